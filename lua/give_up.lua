-- Gives up a version that has lost a part, so that the training is like one that the server has lost.
--
-- KEYS record       redisacc:{NAME}:parameters           the record of the parameters
-- KEYS claims       redisacc:{NAME}:parameters:claims    "worker NUMBER" -> "STEP INCARNATION MS PROCESS", or "asked"
-- ARGV incarnation  text    the incarnation that the client has seen
-- ARGV version      text    id of the version
--
-- Replies:
-- {'gone'}       there is no such version any more
-- {'changed'}    another version is there; nothing changed

-- #bind

-- A chief that follows a dead one finds the hash, and asks the workers before it begins a new training.
local KEPT_MS = 60000

local found = redis.call('HMGET', keys.record, 'incarnation', 'version')
if not found[2] then
  return {'gone'}
elseif found[1] ~= args.incarnation or found[2] ~= args.version then
  return {'changed'}
end
redis.call('HSET', keys.claims, 'asked', '')
redis.call('PEXPIRE', keys.claims, KEPT_MS)
redis.call('UNLINK', keys.record)
return {'gone'}
