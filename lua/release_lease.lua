-- Gives back a lease in the crew of a training, with what its process has claimed to have.
--
-- KEYS crew      redisacc:{NAME}:crew   "chief" or "worker NUMBER" -> "holder lease_end_ms process who"
-- KEYS claims    redisacc:{NAME}:parameters:claims   "worker NUMBER" -> "STEP INCARNATION MS PROCESS"
-- ARGV place     text     which lease: "chief" or "worker NUMBER"
-- ARGV holder    text     id of the holder
-- ARGV process   text     identity of the holder's process
--
-- Replies:
-- {'released'}   the lease is free
-- {'unknown'}    this holder does not hold it; nothing changed

-- #bind

-- Nobody could hand over what it claims. If the server has lost all leases, there may be a claim only.
local claim = redis.call('HGET', keys.claims, args.place)
if claim and string.match(claim, '(%S+)$') == args.process then
  redis.call('HDEL', keys.claims, args.place)
end
local entry = redis.call('HGET', keys.crew, args.place)
if not entry or string.match(entry, '^(%S+) ') ~= args.holder then
  return {'unknown'}
end
redis.call('HDEL', keys.crew, args.place)
return {'released'}
