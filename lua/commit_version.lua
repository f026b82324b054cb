-- Publishes a version of parameters all of whose parts have been written to partitions, if its attempt still stands.
--
-- KEYS record       redisacc:{NAME}:parameters           the record of the parameters
-- KEYS attempts     redisacc:{NAME}:parameters:attempts  "BLOB parts" -> when its parts may be removed; 0: at once
-- ARGV incarnation  text     the incarnation that the client has seen; for a first version, the one that it gets
-- ARGV previous     text     id of the version that this one follows; "" if it is the first
-- ARGV version      text     id of the version
-- ARGV step         int64    step of the version
-- ARGV replaces     flag     whether it may have the step of the version that it follows, which has lost parts
-- ARGV event        text     what waiting readers are told
-- ARGV blobs...     text     "BLOB parts" of each blob that was written
-- ARGV retired...   text     "BLOB parts" of blobs of the version before that the new one does without
-- ARGV removed...   text     "BLOB parts" of blobs of still earlier versions, which go at once
-- ARGV fields...    bytes    what else the record gets: the name of a field, its value, and so on
--
-- Replies:
-- {'published'}              the version is visible; also if it was already, because a request was sent again
-- {'expired'}                the attempt was given up, and its parts may be gone: begin a new attempt; nothing changed
-- {'changed'}                another version than the previous one is there; nothing changed: read the record again
-- {'older', step}            the version that is there has this step, which is not lower; nothing changed
-- {'deleting', incarnation}  a client is deleting the parameters, or died while it was; nothing changed
-- {'missing'}                there are no such parameters
-- {'replaced'}               the parameters were deleted and published again
-- {'corrupt', where, text}   the record holds what redisacc never writes; nothing changed

-- #include "even_when_full"
-- #include "now_ms"
-- #include "publish_version"
-- #include "refused_version"
-- #bind

local RETIRED_MS = 60000

local refusal = refused_version(keys.record, args, args.replaces)
if refusal then
  return refusal
end
if redis.call('EXISTS', keys.record) == 0 then
  -- The record of a first version has expired, and with it the numbers of its partitions.
  return {'expired'}
end
for _, blob in ipairs(args.blobs) do
  if tonumber(redis.call('ZSCORE', keys.attempts, blob) or 0) == 0 then
    return {'expired'}
  end
end

-- The parts already occupy their memory, so refusing the version now would free none.
even_when_full(keys.record)
for _, blob in ipairs(args.blobs) do
  redis.call('ZREM', keys.attempts, blob)
end
-- Readers of the version before may still be fetching them. No script can give them an expiry, so the list says from
-- when on whoever sweeps removes them.
local retired_until = string.format('%.0f', now_ms() + RETIRED_MS)
for _, blob in ipairs(args.retired) do
  redis.call('ZADD', keys.attempts, retired_until, blob)
end
for _, blob in ipairs(args.removed) do
  redis.call('ZADD', keys.attempts, 'XX', 0, blob)
end
publish_version(keys.record, args)
redis.call('PERSIST', keys.record)
return {'published'}
