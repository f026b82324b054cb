-- Registers an attempt to publish a version of parameters in partitions, before the first of its parts is to stay, and
-- tells updaters of its order, if an optimizer makes it.
--
-- KEYS record       redisacc:{NAME}:parameters           the record of the parameters
-- KEYS attempts     redisacc:{NAME}:parameters:attempts  "BLOB parts" -> when its parts may be removed; 0: at once
-- KEYS deleted      redisacc:{NAME}:parameters:deleted   incarnations that were deleted
-- ARGV incarnation  text     the incarnation that the client has seen; for a first version, the one that it gets
-- ARGV previous     text     id of the version that this one follows; "" if it is the first
-- ARGV version      text     id of the version: a random text, or a digest of its order; a hyphen; and the number
-- ARGV step         int64    step of the version
-- ARGV replaces     flag     whether it may have the step of the version that it follows, which has lost parts
-- ARGV number       number   the number of the attempt: one more than those before it
-- ARGV order        text     what updaters are told; "": no optimizer makes it
-- ARGV partitions   text     numbers of the partitions, such as "0,2,3", that the parameters get with a first version
-- ARGV lease_ms     number   how long the attempt may take, in milliseconds
-- ARGV blobs...     text     "BLOB parts" of each blob in partitions
--
-- Replies:
-- {'registered'}             the parts may be made to stay, until the lease ends
-- {'renumbered', number}     the attempt needs another number, because this one is another's, or was given up; nothing
--                            changed
-- {'published'}              the version is visible already
-- {'changed'}                another version than the previous one is there, or the first one was begun by somebody
--                            else; nothing changed: read the record again
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

local BEGUN_MS = 60000

local refusal = refused_version(keys.record, args, keys.deleted)
if refusal then
  return refusal
end
local found = redis.call('HMGET', keys.record, 'attempts', 'registered')
local number = parse_count(found[1] or '0')
if not number then
  return {'corrupt', 'attempts', string.sub(found[1], 1, 64)}
end
-- A copy of this request that arrives late must never revive an attempt that was given up: publish would then show a
-- version whose parts have been removed. So a number is given once, but to the same order.
local is_next = args.number == number + 1
if args.number == number and found[2] == args.version then
  -- It was registered before: by a copy of this request, or by a chief that died. Unless the attempt was given up
  -- since, its parts are made of the same order, and are there as far as somebody has written them.
  is_next = true
  for _, blob in ipairs(args.blobs) do
    is_next = is_next and tonumber(redis.call('ZSCORE', keys.attempts, blob) or 0) ~= 0
  end
end
if not is_next then
  return {'renumbered', tostring(number + 1)}
end
-- This raises if the key has another type, before anything changes.
redis.call('ZSCORE', keys.attempts, '')
if args.previous == '' then
  -- Readers see nothing of a record without a version. It tells other publishers where the parts of the first version
  -- belong, and expires if nobody publishes one.
  if redis.call('HSETNX', keys.record, 'incarnation', args.incarnation) == 1 then
    -- The list may still have attempts of an earlier incarnation, whose record has expired. Their parts lie in its
    -- partitions, which may be others, so no sweep of this one would find them. `redisacc doctor --fix` does, once
    -- they are not listed.
    redis.call('UNLINK', keys.attempts)
  end
  redis.call('HSETNX', keys.record, 'partitions', args.partitions)
  -- It lasts until a minute after the last lease: a smaller version must not shorten what a larger one needs.
  local expiry_ms = args.lease_ms + BEGUN_MS
  if redis.call('PTTL', keys.record) < expiry_ms then
    redis.call('PEXPIRE', keys.record, expiry_ms)
  end
end
redis.call('HSET', keys.record, 'attempts', args.number)
if args.order ~= '' then
  redis.call('HSET', keys.record, 'registered', args.version)
end
local lease_end = string.format('%.0f', now_ms() + args.lease_ms)
for _, blob in ipairs(args.blobs) do
  redis.call('ZADD', keys.attempts, lease_end, blob)
end
if args.order ~= '' then
  notify(keys.record .. ':events', args.order)
end
return {'registered'}
