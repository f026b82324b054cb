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

-- #include "integer_text"
-- #include "now_ms"
-- #include "notify"
-- #include "staged_parts"
-- #bind

local RETIRED_MS = 60000

local function refuse(reply)
  return refuse_parts(keys.staged, reply)
end

local current = redis.call('HMGET', keys.record, 'incarnation', 'version', 'step')
local incarnation, version, step = current[1], current[2], current[3]
if not incarnation then
  if redis.call('EXISTS', keys.record) == 1 then
    return refuse({'corrupt', 'incarnation', ''})
  elseif args.previous ~= '' then
    return refuse({'missing'})
  end
else
  local deleted = string.match(incarnation, '^deleted:(.*)$')
  if deleted then
    return refuse({'deleting', deleted})
  elseif version == args.version then
    return refuse({'published'})
  elseif incarnation ~= args.incarnation then
    return refuse({args.previous == '' and 'changed' or 'replaced'})
  elseif not is_integer_text(step or '') then
    return refuse({'corrupt', 'step', string.sub(step or '', 1, 64)})
  elseif version ~= args.previous then
    return refuse({'changed'})
  elseif not integer_text_less(step, args.step) then
    return refuse({'older', step})
  end
end
local unstaged = unstaged_part(keys.staged, args.lengths)
if unstaged then
  return refuse(unstaged)
end

-- A server at maxmemory lets a script finish that has begun to write.
keep_parts(keys.staged, keys.objects)
local now = string.format('%.0f', now_ms())
redis.call('HSET', keys.record, 'incarnation', args.incarnation, 'version', args.version, 'step', args.step,
  'published_ms', now, unpack(args.fields))
redis.call('HSETNX', keys.record, 'created_ms', now)
-- Readers of the version before may still be fetching them.
for _, object in ipairs(keys.retired) do
  redis.call('PEXPIRE', object, RETIRED_MS)
end
notify(keys.record .. ':events', args.event)
return {'published'}
