-- #include "count_text"

-- Reads what the sums of a round must add up to. Returns a table, or nil and the reply {'corrupt', 'sums', text}.
--
-- The field "total" of the hash has the text "gradients rows": the number of gradients that were added, and of all
-- their rows together. If a weight of the round differs from 1, "gradients rows weight" also has the sum of their
-- weights, and `weight` of the table is a number. It is in the hash and not in the record, so that a reader of the
-- round notices if the hash, or a row of it, was evicted and started again.
local function read_total(sums_key)
  local text = redis.call('HGET', sums_key, 'total')
  if not text then
    return {gradients = 0, rows = 0}
  end
  local gradients, rows, rest = string.match(text, '^(%d+) (%d+)(.*)$')
  gradients, rows = parse_count(gradients), parse_count(rows)
  local weight
  if rest and rest ~= '' then
    -- #include "parse_weight"
    weight = parse_weight(string.match(rest, '^ (%S+)$'))
  end
  if not (gradients and rows and (rest == '' or weight)) then
    return nil, {'corrupt', 'sums', string.sub(text, 1, 64)}
  end
  return {gradients = gradients, rows = rows, weight = weight}
end

local function total_text(total)
  local text = string.format('%.0f %.0f', total.gradients, total.rows)
  if total.weight then
    -- #include "weight_text"
    text = text .. ' ' .. weight_text(total.weight)
  end
  return text
end
