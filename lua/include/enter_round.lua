-- #include "buffered_entry"
-- #include "count_text"
-- #include "extend_leases"

-- Lists a gradient among the buffered ones of the round, in place of the ones that it replaces. bytes: the new total of
-- the buffered gradients.
--
-- keys: record, buffered, inline. request: header, replaced, weight, summed_weight.
local function enter_round(keys, request, admission, gradient, order, bytes)
  redis.call('HSET', keys.buffered, gradient, buffered_entry(order, admission.weight, request))
  if #request.replaced > 0 then
    redis.call('HDEL', keys.buffered, unpack(request.replaced))
    redis.call('HDEL', keys.inline, unpack(request.replaced))
  end
  redis.call('HSET', keys.record, 'buffered_bytes', count_text(bytes))
  extend_leases(admission.record.lease_ms, keys.buffered, keys.inline)
end
