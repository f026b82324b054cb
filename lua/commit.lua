-- Buffers one gradient in the current round, without adding it to the sums.
--
-- KEYS record          redisacc:{NAME}               the record of the accumulator
-- KEYS buffered        redisacc:{NAME}:buffered      gradient id -> "order header", "order*weight header"
-- KEYS inline          redisacc:{NAME}:inline        gradient id -> data of an inline gradient
-- KEYS workers         redisacc:{NAME}:workers       worker -> its number of gradients in this round, traceparents
-- KEYS sessions        redisacc:{NAME}:sessions      session id -> its last request, the outcome, and totals
-- KEYS attempts        redisacc:{NAME}:attempts      "ATTEMPT parts" -> end of its lease; 0: its parts are to go
-- KEYS place...        redisacc:{NAME}:place:ID      the place that was reserved for the gradient, if it has parts here
-- KEYS parts...        redisacc:{NAME}:part:ID:K     the parts as the client SET them here, with an expiry
-- KEYS replaced_parts... redisacc:{NAME}:part:ID:K   parts of the gradients that are replaced; large ones get an expiry
-- ARGV incarnation     text      the incarnation that the handle opened
-- ARGV session         text      id of the sender
-- ARGV sequence        number    number of the request; a session's numbers grow, and a repeated one changes nothing
-- ARGV acknowledged    number    the last request whose outcome the session knows; 0 if there is none
-- ARGV worker          text      name under which the gradient is counted
-- ARGV local_step      int64     the step for which the gradient was computed
-- ARGV own_step        flag      whether it is dropped if it is of a later step than the round
-- ARGV notes           text      what is noted of it for takers: see contribution.lua; "" if nothing is
-- ARGV round_shape     text      the shape that all gradients of a round must share, such as "[16]"
-- ARGV weight          number    factor applied to the gradient, before its staleness counts
-- ARGV summed_weight   text      if this is a sum: the weight that the gradient of this request has in it; else ""
-- ARGV gradient        text      id of the gradient
-- ARGV attempt         text      "ATTEMPT parts" if its parts are in partitions; else ""
-- ARGV order           text      its place in the order of the round if that follows the workers' numbers; else ""
-- ARGV registered      text      the place that register gave it, if its parts are in partitions; else ""
-- ARGV header          bytes     msgpack, opaque to this script; "" only asks whether it would be accepted
-- ARGV data            bytes     all bytes of an inline gradient; "" if the gradient has parts
-- ARGV bytes           number    bytes that it has in partitions
-- ARGV ahead_bytes     number    a gradient of at least this many bytes wakes a waiting taker to fetch it ahead
-- ARGV replaced_bytes  number    bytes in partitions of the gradients that are replaced
-- ARGV lengths...      number    bytes of each part
-- ARGV replaced...     text      ids of the gradients that are replaced, the oldest first
-- ARGV replaced_attempts... text      "ATTEMPT parts" of those of them that have parts in partitions
--
-- Replies:
-- {'applied', global_step, num_accumulated}   the gradient is buffered and counted
-- {'swapped', global_step, num_accumulated}   this copy of the request has done so, and removed what the gradient
--                                             replaces
-- {'stale', global_step, num_accumulated}     local_step < global_step - max_staleness, or local_step > global_step
--                                             and own_step: the gradient was dropped
-- {'repeated', global_step, num_accumulated}  the round has a gradient of this worker: this one was dropped
-- {'fenced', global_step, num_accumulated}    resolve had already ruled this request out; only duplicates grew
-- {'would_accept'}                            the header is empty, and the gradient would be buffered; nothing changed
-- {'full', buffered_bytes, buffer_limit, weight}
--                                             the gradient would exceed the limit. weight is its effective weight now
-- {'changed'}                                 a gradient that this one replaces is gone, or the sum contains this
--                                             request's gradient with another weight than it has now
-- {'unweighable', weight, total_weight}       this weight, or the total with it, is out of bounds
-- {'shape_mismatch', bound}                   the round holds gradients of another shape
-- {'unwritten', part}                         this part is missing or has another length: write again
-- {'expired'}                                 the attempt was given up, and its parts may be gone: begin a new one
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
-- #include "drop_strings"
-- #include "even_when_full"
-- #include "written_parts"
-- #bind

-- A small gradient arrives inline, as an argument. The parts of a large one have been written: here just before this
-- script, whose STRLEN proves that they are there; in partitions earlier, and their lease proves it. When the buffered
-- gradients have reached their limit, the client adds some of them to its own, and the sum replaces them.

local is_leased = args.attempt ~= '' and tonumber(redis.call('ZSCORE', keys.attempts, args.attempt) or 0) > 0

-- A refusal ends an attempt in partitions, and a sweeper removes its parts. Those here go if the reply proves that no
-- copy of this request was counted. Otherwise, they may be counted, or taken by now: those that are not expire.
local function refuse(reply)
  if args.attempt ~= '' then
    redis.call('ZADD', keys.attempts, 'XX', 0, args.attempt)
  elseif reply[1] ~= 'applied' and reply[1] ~= 'superseded' and reply[1] ~= 'forgotten' and reply[1] ~= 'lost'
    and reply[1] ~= 'corrupt' then
    drop_parts(keys)
  end
  return reply
end

if is_leased or (#keys.parts > 0 and args.header ~= '' and redis.call('EXISTS', keys.parts[1]) == 1) then
  -- The parts already occupy their memory, so refusing them now would free none.
  even_when_full(keys.record)
end
local admission, refusal = admit(keys, args, true)
if not admission then
  return refuse(refusal)
end
if args.attempt ~= '' and not is_leased then
  return {'expired'}
end

-- These raise if a key has another type, before anything changes.
redis.call('HLEN', keys.buffered)
redis.call('HLEN', keys.inline)
-- The taker adds in the order of places, so a sum is the same whoever adds it up. A gradient takes the place of the
-- oldest one that it replaces, else the one that its sender gives, else the one that was reserved when its upload
-- began, else the last.
local reserved = args.registered ~= '' and args.registered or keys.place[1] and redis.call('GET', keys.place[1])
if reserved and not parse_count(reserved) then
  return refuse({'corrupt', 'place', string.sub(reserved, 1, 64)})
end
local size, replaced_bytes, replaced_sizes = #args.data + args.bytes, args.replaced_bytes, {}
for _, length in ipairs(args.lengths) do
  size = size + length
end
for k, part in ipairs(keys.replaced_parts) do
  replaced_sizes[k] = redis.call('STRLEN', part)
  replaced_bytes = replaced_bytes + replaced_sizes[k]
end
local room
room, refusal = room_in_round(keys, args, admission, size, replaced_bytes)
if not room then
  return refuse(refusal)
end
if args.header == '' then
  return {'would_accept'}
end
local unwritten = unwritten_part(keys.parts, args.lengths)
if unwritten then
  return refuse(unwritten)
end

local order = room.order or (args.order ~= '' and args.order) or reserved
  or tostring(redis.call('HINCRBY', keys.record, 'places', 1))
if #args.data > 0 then
  redis.call('HSET', keys.inline, args.gradient, args.data)
end
keep_parts(keys, admission.record.lease_ms)
drop_strings(keys.replaced_parts, replaced_sizes)
if is_leased then
  redis.call('ZREM', keys.attempts, args.attempt)
end
for _, replaced in ipairs(args.replaced_attempts) do
  redis.call('ZADD', keys.attempts, 0, replaced)
end
if is_leased or #args.replaced_attempts > 0 then
  extend_leases(admission.record.lease_ms, keys.attempts)
end
enter_round(keys, args, admission, args.gradient, order, room.bytes)
local _, power_before = math.frexp(admission.record.buffered_bytes)
local _, power = math.frexp(room.bytes)
local ahead
if size >= args.ahead_bytes then
  ahead = args.gradient
elseif room.bytes >= args.ahead_bytes and power > power_before then
  -- Smaller ones wake it when their total size passes a power of two, because a look ahead costs the taker about half
  -- of what such a gradient costs.
  ahead = '*'
end
local reply = count_gradient(keys, args, admission, size, args.gradient, ahead)
if #args.replaced > 0 then
  return {'swapped', reply[2], reply[3]}
end
return reply
