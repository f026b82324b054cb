-- #include "count_text"

-- Reads what the sums of a round must add up to. Returns a table, or nil and the reply {'corrupt', 'sums', text}.
--
-- The field "total" of the hash has the text "gradients rows": the number of gradients that were added, and of all
-- their rows together. It lies in the hash and not in the record, so that a reader of the round notices if the hash, or
-- a row of it, was evicted and started again.
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
