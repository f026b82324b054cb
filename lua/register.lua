-- Registers an attempt to store a gradient in partitions, before the first of its parts is written.
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
-- ARGV own_step        flag      whether it is dropped if it is of a later step than the round
-- ARGV round_shape     text      the shape that all gradients of a round must share, such as "[16]"
-- ARGV weight          number    factor applied to the gradient, before its staleness counts
-- ARGV summed_weight   text      if this is a sum: the weight that the gradient of this request has in it; else ""
-- ARGV gradient        text      id of the gradient; the attempt's id is this, a hyphen and the place
-- ARGV order           text      its place in the order of the round if that follows the workers' numbers; else ""
-- ARGV parts           number    how many parts it has
-- ARGV bytes           number    how many bytes they have together
-- ARGV lease_ms        number    how long the attempt may take, in milliseconds
-- ARGV announced       text      header of the gradient, in hexadecimal, if it is announced; else ""
-- ARGV holds_ms        number    for how long it keeps its place although nothing arrives, in milliseconds; 0: as usual
-- ARGV replaced_bytes  number    bytes in partitions of the gradients that are replaced
-- ARGV replaced...     text      ids of the gradients that are replaced, the oldest first
--
-- Replies:
-- {'registered', place}                       the attempt may write its parts; place is its place in the order of the
--                                             round unless its sender gives one, and no other attempt gets this number
-- {'applied', global_step, num_accumulated}   the request has been executed: the reply of commit
-- {'stale', global_step, num_accumulated}     local_step < global_step - max_staleness, or local_step > global_step
--                                             and own_step: the gradient was dropped
-- {'repeated', global_step, num_accumulated}  the round has a gradient of this worker: this one was dropped
-- {'fenced', global_step, num_accumulated}    resolve had already ruled this request out; only duplicates grew
-- {'full', buffered_bytes, buffer_limit, weight}
--                                             the gradient would exceed the limit; nothing changed. weight is its
--                                             effective weight now
-- {'changed'}                                 a gradient that this one replaces is gone, or the sum contains this
--                                             request's gradient with another weight than it has now; nothing changed
-- {'unweighable', weight, total_weight}       this weight, or the total with it, is out of bounds; nothing changed
-- {'shape_mismatch', bound}                   the round holds gradients of another shape; nothing changed
-- {'superseded', sequence}                    a later request of this session has been executed; nothing changed
-- {'forgotten', now_ms}                       the session is unknown and too old to be new; nothing changed
-- {'lost', sequence}                          the session knows the outcome of a later request than this one, which is
--                                             the last that the server knows; nothing changed
-- {'missing'}                                 there is no such accumulator
-- {'replaced'}                                the accumulator was deleted and created again
-- {'corrupt', where, text}                    a key or field holds what redisacc never writes; nothing changed

-- Nothing is counted yet.
-- luacheck: ignore 211/count_gradient
-- #include "admit"
-- #include "room_in_round"
-- #include "announce_upload"
-- #bind

local admission, refusal = admit(keys, args, true)
if not admission then
  return refusal
end
local room
room, refusal = room_in_round(keys, args, admission, args.bytes, args.replaced_bytes)
if not room then
  return refusal
end
-- This raises if the key has another type, before anything changes.
redis.call('ZSCORE', keys.attempts, '')
-- A copy of this request that arrives late gets another place, so it can never revive an attempt that was given up:
-- commit would then count a gradient whose parts have been removed.
local place = tostring(redis.call('HINCRBY', keys.record, 'places', 1))
local attempt = args.gradient .. '-' .. place
redis.call('ZADD', keys.attempts, count_text(now_ms() + args.lease_ms), string.format('%s %.0f', attempt, args.parts))
extend_leases(admission.record.lease_ms, keys.attempts)
if args.announced ~= '' then
  local order = args.order ~= '' and args.order or place
  announce_upload(keys.record, attempt, order, admission.weight, args.round_shape, args.announced,
    args.holds_ms)
end
return {'registered', place}
