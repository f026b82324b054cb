-- Publishes a version of parameters.
--
-- KEYS record       redisacc:{NAME}:parameters                 the record of the parameters
-- KEYS staged...    redisacc:{NAME}:parameters:staged:BLOB:K   the parts as the client SET them, with an expiry
-- KEYS objects...   redisacc:{NAME}:parameters:object:BLOB:K   the keys to which the staged parts are renamed
-- KEYS retired...   redisacc:{NAME}:parameters:object:BLOB:K   parts of the version before that the new one does
--                                                              without; they get an expiry
-- ARGV incarnation  text     the incarnation that the client has seen; for a first version, the one that it gets
-- ARGV previous     text     id of the version that this one follows; "" if it is the first
-- ARGV version      text     id of the version
-- ARGV step         int64    step of the version
-- ARGV event        text     what waiting readers are told
-- ARGV lengths...   number   bytes of each part
-- ARGV fields...    bytes    what else the record gets: the name of a field, its value, and so on
--
-- Replies:
-- {'published'}              the version is visible; also if it was already, because a request was sent again
-- {'changed'}                another version than the previous one is there; nothing changed: read the record again
-- {'older', step}            the version that is there has this step, which is not lower; nothing changed
-- {'unstaged', part}         this part is missing or has another length; nothing changed: stage again
-- {'deleting', incarnation}  a client is deleting the parameters, or died while it was; nothing changed
-- {'missing'}                there are no such parameters
-- {'replaced'}               the parameters were deleted and published again
-- {'corrupt', where, text}   the record holds what redisacc never writes; nothing changed

-- #include "publish_version"
-- #include "refused_version"
-- #include "staged_parts"
-- #bind

local RETIRED_MS = 60000

local refusal = refused_version(keys.record, args) or unstaged_part(keys.staged, args.lengths)
if refusal then
  return refuse_parts(keys.staged, refusal)
end

-- A server at maxmemory lets a script finish that has begun to write.
keep_parts(keys.staged, keys.objects)
-- Readers of the version before may still be fetching them.
for _, object in ipairs(keys.retired) do
  redis.call('PEXPIRE', object, RETIRED_MS)
end
publish_version(keys.record, args)
return {'published'}
