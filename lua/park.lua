-- Takes one gradient into the current round, to be held whole: a small one as it comes here, a large one in the parts
-- that the client has just staged. Where the parked gradients have reached their limit, the client has added some of
-- them to its own, and the sum replaces them.
--
-- KEYS[1] redisacc:{NAME}             the record
-- KEYS[2] redisacc:{NAME}:parked      gradient id -> "order header"
-- KEYS[3] redisacc:{NAME}:small       gradient id -> data of a small one
-- KEYS[4] redisacc:{NAME}:workers     worker -> gradients in this round
-- KEYS[5] redisacc:{NAME}:clients     client -> last request and totals
-- KEYS[6..5+N] redisacc:{NAME}:staged:ID:K    the N parts as the client SET them, with an expiry
-- KEYS[6+N..5+2N] redisacc:{NAME}:part:ID:K   where they go
-- KEYS[6+2N..] redisacc:{NAME}:part:ID:K      parts of the gradients that are replaced; some only get an expiry
-- ARGV[1] incarnation                 the one that the handle opened
-- ARGV[2] client                      id of the sender
-- ARGV[3] sequence                    "number acknowledged": number of the request, growing for each client (the same
--                                     again changes nothing), and the last one of which the client knows the outcome
-- ARGV[4] worker                      name under which the gradient is counted
-- ARGV[5] local_step                  int64 as text
-- ARGV[6] round_shape                 shape that must be the same for all gradients of a round, "[16]"
-- ARGV[7] id                          id of the gradient
-- ARGV[8] header                      msgpack; opaque here. "": only ask whether the gradient would be taken
-- ARGV[9] data                        all bytes of a small gradient; "" if there are parts
-- ARGV[10] parts                      N; 0 for a small gradient
-- ARGV[11..10+N] length               bytes of each part
-- ARGV[11+N..] replaced               ids of the gradients that are replaced, the oldest first
--
-- Replies:
-- {'applied', global_step, num_accumulated}    held and counted
-- {'stale', global_step, num_accumulated}      local_step < global_step: dropped
-- {'welcome'}                                  it would be held; nothing changed
-- {'full', parked_bytes, parked_limit}         it would pass the limit; nothing changed
-- {'changed'}                                  what it would replace isn't there any more; nothing changed
-- {'misshapen', round_shape}                   the round holds gradients of another shape; nothing changed
-- {'unstaged', K}                              part K isn't there with its length; nothing changed: stage again
-- {'superseded', sequence}                     a later request of this client has been executed; nothing changed
-- {'forgotten', now_ms}                        this client is unknown, and too old to be new; nothing changed
-- {'lost', sequence}                           the client knows the outcome of a later request than this, the last one
--                                              that the server knows; nothing changed
-- {'missing'}                                  no such accumulator
-- {'replaced'}                                 it was deleted and created anew
-- {'corrupt', where, text}                     something under our keys isn't ours; nothing changed

-- #include "admit"
-- #include "drop"
-- #include "even_when_full"

local keys = {record = KEYS[1], parked = KEYS[2], small = KEYS[3], workers = KEYS[4], clients = KEYS[5]}
local request = {
  incarnation = ARGV[1], client = ARGV[2], sequence = ARGV[3], worker = ARGV[4],
  local_step = ARGV[5], round_shape = ARGV[6],
}
local id, header, data, parts = ARGV[7], ARGV[8], ARGV[9], tonumber(ARGV[10])
local staged, final, lengths = {}, {}, {}
for k = 1, parts do
  staged[k], final[k], lengths[k] = KEYS[5 + k], KEYS[5 + parts + k], tonumber(ARGV[10 + k])
end
local replaced = {unpack(ARGV, 11 + parts)}
local replaced_parts = {unpack(KEYS, 6 + 2 * parts)}

-- A taker that waits is woken to fetch ahead by each gradient from this size on, and by others whenever all that
-- is parked passes a power of two from there on: a look ahead costs it about what half of such a gradient costs.
local AHEAD_BYTES = 1048576

-- Whatever the refusal, the staged parts are of no more use: a request that comes again stages them again.
local function refuse(reply)
  if parts > 0 then
    redis.call('UNLINK', unpack(staged))
  end
  return reply
end

if parts > 0 and header ~= '' and redis.call('EXISTS', staged[1]) == 1 then
  -- Its memory is taken already: a refusal now would free none of it.
  even_when_full(keys.record)
end
local admission, refusal = admit(keys, request, {'parked_bytes', 'parked_limit'})
if not admission then
  return refuse(refusal)
end
local record = admission.record

-- Raise where a key is of another type, before anything changes.
redis.call('HLEN', keys.parked)
redis.call('HLEN', keys.small)
-- Without a replaced gradient the place in the order of arrival is the last: the taker adds in this order, so that
-- sums come out bit for bit.
local order = count_text(record.num_accumulated)
local size = #data
for k = 1, parts do
  size = size + lengths[k]
end
local bytes = record.parked_bytes + size
for k = #replaced, 1, -1 do
  local entry = redis.call('HGET', keys.parked, replaced[k])
  if not entry then
    return refuse({'changed'})
  end
  order = string.match(entry, '^%d+') or order
  bytes = bytes - redis.call('HSTRLEN', keys.small, replaced[k])
end
for _, key in ipairs(replaced_parts) do
  bytes = bytes - redis.call('STRLEN', key)
end
bytes = math.max(bytes, 0)
if bytes > record.parked_limit then
  return refuse({'full', count_text(record.parked_bytes), count_text(record.parked_limit)})
end
if header == '' then
  return {'welcome'}
end
for k = 1, parts do
  if redis.call('STRLEN', staged[k]) ~= lengths[k] then
    return refuse({'unstaged', tostring(k)})
  end
end

redis.call('HSET', keys.parked, id, order .. ' ' .. header)
if #data > 0 then
  redis.call('HSET', keys.small, id, data)
end
for k = 1, parts do
  redis.call('RENAME', staged[k], final[k])
  redis.call('PERSIST', final[k])
  keep(record.lease_ms, final[k])
end
if #replaced > 0 then
  redis.call('HDEL', keys.parked, unpack(replaced))
  redis.call('HDEL', keys.small, unpack(replaced))
end
drop(replaced_parts)
redis.call('HSET', keys.record, 'parked_bytes', count_text(bytes))
keep(record.lease_ms, keys.parked, keys.small)
local _, power_before = math.frexp(record.parked_bytes)
local _, power = math.frexp(bytes)
local ahead
if size >= AHEAD_BYTES then
  ahead = id
elseif bytes >= AHEAD_BYTES and power > power_before then
  ahead = '*'
end
return count_gradient(keys, request, admission, id, ahead)
