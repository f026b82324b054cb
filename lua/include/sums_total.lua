-- #include "count_text"

-- What the sums of a round must add up to: the field "total" of their hash is the text "gradients rows", the gradients
-- that were added and how many rows those had together. It goes with the hash, and the record doesn't: so whoever reads
-- the round notices if the hash, or a row of it, was evicted and begun anew.
-- Returns the total, or nil and the reply {'corrupt', 'sums', text}.
local function read_total(sums_key)
  local text = redis.call('HGET', sums_key, 'total')
  if not text then
    return {gradients = 0, rows = 0}
  end
  local gradients, rows = string.match(text, '^(%d+) (%d+)$')
  gradients, rows = parse_count(gradients), parse_count(rows)
  if not (gradients and rows) then
    return nil, {'corrupt', 'sums', string.sub(text, 1, 64)}
  end
  return {gradients = gradients, rows = rows}
end

local function total_text(gradients, rows)
  return count_text(gradients) .. ' ' .. count_text(rows)
end
