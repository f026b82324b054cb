-- An accumulator with max_staleness > 0 counts the gradients of the current round by their staleness, in the field
-- `staleness` of the record: "staleness:number" for each that occurs, in the order in which they first occurred, with
-- commas between them. A round has at most max_staleness + 1 of them.

-- Reads how stale the gradients of the current round are; "" if that is not counted. Returns nil and a reply if the
-- field holds what redisacc never writes. The longest text has about a thousand pairs.
local function read_staleness(record_key, record)
  if record.max_staleness == 0 then
    return ''
  end
  local text = redis.call('HGET', record_key, 'staleness') or ''
  if #text > 30000 or (text == '') ~= (record.num_accumulated == 0) then
    return nil, {'corrupt', 'staleness', string.sub(text, 1, 64)}
  end
  return text
end
