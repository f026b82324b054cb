-- Gives a gradient its place in the order of the round before its parts are written, and announces it.
--
-- KEYS record          redisacc:{NAME}                    the record of the accumulator
-- KEYS buffered        redisacc:{NAME}:buffered           gradient id -> "order header", "order*weight header"
-- KEYS workers         redisacc:{NAME}:workers            worker -> its number of gradients in this round
-- KEYS place           redisacc:{NAME}:place:GRADIENT      the place of the gradient, with an expiry
-- ARGV incarnation     text      the incarnation that the handle opened
-- ARGV worker          text      name under which the gradient will be counted
-- ARGV local_step      int64     the step for which the gradient was computed
-- ARGV own_step        flag      whether it is dropped if it is of a later step than the round
-- ARGV round_shape     text      the shape that all gradients of a round must share, such as "[16]"
-- ARGV weight          number    factor applied to the gradient, before its staleness counts
-- ARGV gradient        text      id of the gradient
-- ARGV order           text      its place in the order of the round if that follows the workers' numbers; else ""
-- ARGV header          text      its header, in hexadecimal, for the announcement
-- ARGV holds_ms        number    for how long it keeps its place although nothing arrives, in milliseconds; 0: as usual
-- ARGV expiry_ms       number    expiry of the place, in milliseconds; the same as for the parts
--
-- Replies:
-- {'placed', place}                           the gradient has this place, and was announced
-- {'ignored'}                                 it would not be accepted, or has been buffered: nothing changed
-- {'missing'}                                 there is no such accumulator
-- {'replaced'}                                the accumulator was deleted and created again
-- {'corrupt', where, text}                    a key or field holds what redisacc never writes; nothing changed

-- #include "read_record"
-- #include "accepted_staleness"
-- #include "effective_weight"
-- #include "announce_upload"
-- #bind

-- A waiting taker adds the parts one by one while they arrive. This only saves time: a gradient without a place gets
-- one when it is buffered.

local record, refusal = read_record(keys.record, args.incarnation, {'once_per_worker', 'max_staleness'}, 1)
if not record then
  return refusal
end
local staleness = accepted_staleness(record, args)
if not staleness
  or redis.call('HSTRLEN', keys.buffered, args.gradient) > 0
  or (record.once_per_worker > 0 and redis.call('HSTRLEN', keys.workers, args.worker) > 0) then
  return {'ignored'}
end
-- The gradient has this weight unless the step grows before it is buffered.
local weight
weight, refusal = effective_weight(keys.record, record, args.weight, staleness)
if not weight then
  return refusal
end
-- If the request is sent again, it keeps its place.
local place = args.order ~= '' and args.order or redis.call('GET', keys.place)
  or tostring(redis.call('HINCRBY', keys.record, 'places', 1))
redis.call('SET', keys.place, place, 'PX', args.expiry_ms)
announce_upload(keys.record, args.gradient, place, weight, args.round_shape, args.header, args.holds_ms)
return {'placed', place}
