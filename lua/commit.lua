-- Counts a gradient after all its parts have been written to partitions, unless its attempt was given up.
--
-- KEYS record          redisacc:{NAME}               the record of the accumulator
-- KEYS buffered        redisacc:{NAME}:buffered      gradient id -> "order header", "order*weight header"
-- KEYS inline          redisacc:{NAME}:inline        gradient id -> data of an inline gradient
-- KEYS workers         redisacc:{NAME}:workers       worker -> its number of gradients in this round, traceparents
-- KEYS sessions        redisacc:{NAME}:sessions      session id -> its last request, the outcome, and totals
-- KEYS attempts        redisacc:{NAME}:attempts      "ATTEMPT parts" -> end of its lease; 0: its parts are to go
-- ARGV incarnation     text      the incarnation that the handle opened
-- ARGV session         text      id of the sender
-- ARGV sequence        number    number of the request; a session's numbers grow, and a repeated one changes nothing
-- ARGV acknowledged    number    the last request whose outcome the session knows; 0 if there is none
-- ARGV worker          text      name under which the gradient is counted
-- ARGV local_step      int64     the step for which the gradient was computed
-- ARGV once            flag      whether the gradient is dropped if the round has one of this worker
-- ARGV notes           text      what is noted of it for takers: see contribution.lua; "" if nothing is
-- ARGV round_shape     text      the shape that all gradients of a round must share, such as "[16]"
-- ARGV weight          number    factor applied to the gradient, before its staleness counts
-- ARGV summed_weight   text      if this is a sum: the weight that the gradient of this request has in it; else ""
-- ARGV gradient        text      id of the gradient; the attempt's id is this, a hyphen and the place
-- ARGV place           text      the place that register gave it
-- ARGV order           text      its place in the order of the round if that follows the workers' numbers; else ""
-- ARGV header          bytes     msgpack, opaque to this script
-- ARGV parts           number    how many parts it has
-- ARGV bytes           number    how many bytes they have together
-- ARGV ahead_bytes     number    a gradient of at least this many bytes wakes a waiting taker to fetch it ahead
-- ARGV replaced_bytes  number    bytes in partitions of the gradients that are replaced
-- ARGV replaced...     text      ids of the gradients that are replaced, the oldest first
-- ARGV replaced_attempts... text      "ATTEMPT parts" of the replaced gradients that have parts
--
-- Replies:
-- {'applied', global_step, num_accumulated}   the gradient is buffered and counted
-- {'expired'}                                 the attempt was given up, and its parts may be gone: begin a new attempt
-- {'stale', global_step, num_accumulated}     local_step < global_step - max_staleness: the gradient was dropped
-- {'repeated', global_step, num_accumulated}  the round has a gradient of this worker: this one was dropped
-- {'fenced', global_step, num_accumulated}    resolve had already ruled this request out; only duplicates grew
-- {'full', buffered_bytes, buffer_limit, weight}
--                                             the gradient would exceed the limit. weight is its effective
--                                             weight now
-- {'changed'}                                 a gradient that this one replaces is gone, or the sum contains this
--                                             request's gradient with another weight than it has now
-- {'unweighable', weight, total_weight}       this weight, or the total with it, is out of bounds
-- {'shape_mismatch', bound}                   the round holds gradients of another shape
-- {'superseded', sequence}                    a later request of this session has been executed
-- {'forgotten', now_ms}                       the session is unknown and too old to be new
-- {'lost', sequence}                          the session knows the outcome of a later request than this one, which is
--                                             the last that the server knows
-- {'missing'}                                 there is no such accumulator
-- {'replaced'}                                the accumulator was deleted and created again
-- {'corrupt', where, text}                    a key or field holds what redisacc never writes

-- #include "admit"
-- #include "room_in_round"
-- #include "enter_round"
-- #include "even_when_full"
-- #bind

-- After a refusal, this attempt is over, and a sweeper removes its parts. Nothing else changes.

local attempt = args.gradient .. '-' .. args.place
local member = string.format('%s %.0f', attempt, args.parts)

local function refuse(reply)
  redis.call('ZADD', keys.attempts, 'XX', 0, member)
  return reply
end

local lease_end = tonumber(redis.call('ZSCORE', keys.attempts, member) or 0)
if lease_end > 0 then
  -- Its parts already occupy their memory, so refusing them now would free none.
  even_when_full(keys.record)
end
local admission, refusal = admit(keys, args, true)
if not admission then
  return refuse(refusal)
end
if lease_end == 0 then
  return {'expired'}
end
local room
room, refusal = room_in_round(keys, args, admission, args.bytes, args.replaced_bytes)
if not room then
  return refuse(refusal)
end

-- These raise if a key has another type, before anything changes.
redis.call('HLEN', keys.buffered)
redis.call('HLEN', keys.inline)
redis.call('ZREM', keys.attempts, member)
for _, replaced in ipairs(args.replaced_attempts) do
  redis.call('ZADD', keys.attempts, 0, replaced)
end
extend_leases(admission.record.lease_ms, keys.attempts)
enter_round(keys, args, admission, attempt, room.order or (args.order ~= '' and args.order) or args.place,
  room.bytes)
return count_gradient(keys, args, admission, args.bytes, attempt, args.bytes >= args.ahead_bytes and attempt)
