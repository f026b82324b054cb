-- Opens the accumulator of a name, or creates it.
--
-- KEYS[1] redisacc:{NAME}             the record
-- KEYS[2] redisacc:{NAME}:sums        what can't be there without a record
-- KEYS[3] redisacc:{NAME}:parked
-- KEYS[4] redisacc:{NAME}:small
-- KEYS[5] redisacc:{NAME}:workers
-- KEYS[6] redisacc:{NAME}:clients
-- ARGV[1] incarnation        random id, which the accumulator gets if it is created now
-- ARGV[2] format             version of the data model
-- ARGV[3] kind               "dense" or "sparse"
-- ARGV[4] dtype              "float32"
-- ARGV[5] shape              "[100,-1]", or "unknown"
-- ARGV[6] reduction_type     "MEAN" or "SUM"
-- ARGV[7] chunk              elements of a row of a dense gradient
-- ARGV[8] lease_ms           for how long a private accumulator outlives its owner; 0: shared, it has no end
-- ARGV[9] parked_limit       bytes that the parked gradients of a round may have together
--
-- Replies:
-- {'opened', struct, now_ms, incarnation, format, kind, dtype, shape, reduction_type, chunk, lease_ms,
--  parked_limit}
--                            as it was created; struct is "yes" where the server's Lua has that library, now_ms
--                            the server's clock
-- {'deleting', incarnation}  it is being deleted; whoever did may have died: finish it, then open again
-- {'remains', key}           there is no record, but a key of an accumulator that had one; nothing changed
-- {'corrupt', where, text}   the record isn't ours; nothing changed

-- #include "forget_idle"
-- #include "keep"

local record, clients = KEYS[1], KEYS[6]
local incarnation, format, kind, dtype, shape, reduction_type, chunk, lease_ms, parked_limit =
  ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6], ARGV[7], ARGV[8], ARGV[9]

local names = {
  'incarnation', 'format', 'kind', 'dtype', 'shape', 'reduction_type', 'chunk', 'lease_ms', 'parked_limit',
}

forget_idle(clients)
if redis.call('EXISTS', record) == 0 then
  -- The record was evicted or removed by hand. A new one would take over sums that it doesn't count.
  for i = 2, #KEYS do
    if redis.call('EXISTS', KEYS[i]) == 1 then
      return {'remains', KEYS[i]}
    end
  end
  redis.call('HSET', record, 'format', format, 'kind', kind, 'dtype', dtype, 'shape', shape,
    'reduction_type', reduction_type, 'incarnation', incarnation, 'global_step', '0', 'num_accumulated', '0',
    'round_shape', '', 'applied', '0', 'stale', '0', 'duplicates', '0', 'takes', '0', 'tickets', '0',
    'parked_bytes', '0', 'parked_limit', parked_limit, 'wanted', '0', 'chunk', chunk, 'lease_ms', lease_ms,
    'created_ms', string.format('%.0f', now_ms()))
  keep(tonumber(lease_ms), record)
end

local fields = redis.call('HMGET', record, unpack(names))
-- rawget: naming a global that isn't there is an error in Redis.
local reply = {'opened', rawget(_G, 'struct') and 'yes' or 'no', string.format('%.0f', now_ms())}
for i, name in ipairs(names) do
  if not fields[i] then
    return {'corrupt', name, ''}
  end
  reply[i + 3] = fields[i]
end
local deleted = string.match(fields[1], '^deleted:(.*)$')
if deleted then
  return {'deleting', deleted}
end
return reply
