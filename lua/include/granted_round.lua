-- #include "integer_text"
-- #include "count_text"

-- A round that was taken and not yet acknowledged is the field TOKEN of the taken hash, with the text
-- "state global_step num_accumulated granted_ms round_shape taker". The state is "granted", or "acknowledged" while the
-- parts of the round are being removed. If the accumulator counts the staleness of gradients, "staleness=TEXT " comes
-- before the shape, and so does "weight=TEXT " if a weight of the round differs from 1.

-- Returns the reply that hands out a round, or nil if the token has none, or has one that is being removed.
local function granted_round(taken_key, token)
  local text = redis.call('HGET', taken_key, token)
  if not text then
    return nil
  end
  if string.sub(text, 1, 13) == 'acknowledged ' then
    -- Its taker has it, and parts of it are gone.
    return nil
  end
  local state, step, count, rest = string.match(text, '^(%a+) (%-?%d+) (%d+) %d+ (.*)$')
  local staleness, after = string.match(rest or '', '^staleness=([%d:,]+) (.*)$')
  rest = after or rest or ''
  local weight
  weight, after = string.match(rest, '^weight=(%S+) (.*)$')
  local shape = string.match(after or rest, '^(%S+) ')
  local is_known = state == 'granted' and is_integer_text(step) and parse_count(count) and shape
  if is_known and weight then
    -- #include "parse_weight"
    is_known = parse_weight(weight)
  end
  if not is_known then
    return {'corrupt', 'taken', string.sub(text, 1, 64)}
  end
  return {'granted', step, count, shape, staleness or '', weight or ''}
end
