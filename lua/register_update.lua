-- Registers the version that an optimiser makes of a round, in partitions, and tells updaters of it.
--
-- KEYS record       redisacc:{NAME}:parameters           the record of the parameters
-- KEYS attempts     redisacc:{NAME}:parameters:attempts  "BLOB parts" -> when its parts may be removed; 0: at once
-- ARGV incarnation  text     the incarnation that the client has seen
-- ARGV previous     text     id of the version that this one follows
-- ARGV version      text     id of the version: a digest of its order, a hyphen and the number
-- ARGV step         int64    step of the version
-- ARGV replaces     flag     whether it may have the step of the version that it follows, which has lost parts
-- ARGV number       number   the number of the attempt: one more than those before it
-- ARGV order        text     what updaters are told
-- ARGV lease_ms     number   how long the attempt may take, in milliseconds
-- ARGV blobs...     text     "BLOB parts" of each blob in partitions
--
-- Replies:
-- {'registered'}             the parts may be made to stay, until the lease ends
-- {'renumbered', number}     the attempt needs another number, because this one was given up, or belongs to another
--                            order; nothing changed
-- {'published'}              the version is visible already
-- {'changed'}                another version than the previous one is there; nothing changed: read the record again
-- {'older', step}            the version that is there has this step, which is not lower; nothing changed
-- {'deleting', incarnation}  a client is deleting the parameters, or died while it was; nothing changed
-- {'missing'}                there are no such parameters
-- {'replaced'}               the parameters were deleted and published again
-- {'corrupt', where, text}   the record holds what redisacc never writes; nothing changed

-- #include "count_text"
-- #include "notify"
-- #include "now_ms"
-- #include "refused_version"
-- #bind

local refusal = refused_version(keys.record, args)
if refusal then
  return refusal
end
local found = redis.call('HMGET', keys.record, 'attempts', 'registered')
local number = parse_count(found[1] or '0')
if not number then
  return {'corrupt', 'attempts', string.sub(found[1], 1, 64)}
end
if args.number == number and found[2] == args.version then
  -- It was registered before: by a copy of this request, or by a chief that died. Unless the attempt was given up
  -- since, its parts are made of the same order, and are there as far as somebody has written them.
  for _, blob in ipairs(args.blobs) do
    if tonumber(redis.call('ZSCORE', keys.attempts, blob) or 0) == 0 then
      return {'renumbered', tostring(number + 1)}
    end
  end
elseif args.number ~= number + 1 then
  return {'renumbered', tostring(number + 1)}
end
redis.call('HSET', keys.record, 'attempts', args.number, 'registered', args.version)
local lease_end = string.format('%.0f', now_ms() + args.lease_ms)
for _, blob in ipairs(args.blobs) do
  redis.call('ZADD', keys.attempts, lease_end, blob)
end
notify(keys.record .. ':events', args.order)
return {'registered'}
