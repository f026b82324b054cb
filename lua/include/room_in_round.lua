-- #include "count_text"
-- #include "summed_as_now"

-- Decides whether the round has room for a gradient. Returns a table: the bytes of all buffered gradients with this
-- one, and the place of the oldest gradient that it replaces, if it replaces any. Returns nil and the reply if there is
-- no room, or if a gradient that it replaces is gone.
--
-- keys: buffered, inline. request: replaced, summed_weight. admission.record: buffered_bytes, buffer_limit. size: the
-- bytes of the gradient. replaced_bytes: the bytes in parts of the gradients that it replaces.
local function room_in_round(keys, request, admission, size, replaced_bytes)
  local order, record = nil, admission.record
  if not is_summed_as_now(admission.weight, request) then
    return nil, {'changed'}
  end
  local bytes = record.buffered_bytes + size - replaced_bytes
  if #request.replaced > 0 then
    -- Together, because one by one took twice as long.
    local entries = redis.call('HMGET', keys.buffered, unpack(request.replaced))
    for k = #request.replaced, 1, -1 do
      if not entries[k] then
        return nil, {'changed'}
      end
      order = string.match(entries[k], '^%d+') or order
      bytes = bytes - redis.call('HSTRLEN', keys.inline, request.replaced[k])
    end
  end
  bytes = math.max(bytes, 0)
  if bytes > record.buffer_limit then
    -- #include "weight_text"
    return nil, {'full', count_text(record.buffered_bytes), count_text(record.buffer_limit),
      weight_text(admission.weight)}
  end
  return {bytes = bytes, order = order}
end
