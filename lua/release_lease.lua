-- Gives back a lease in the crew of a training.
--
-- KEYS crew      redisacc:{NAME}:crew   "chief" or "worker NUMBER" -> "holder lease_end_ms process who"
-- ARGV place      text     which lease: "chief" or "worker NUMBER"
-- ARGV holder    text     id of the holder
--
-- Replies:
-- {'released'}   the lease is free
-- {'unknown'}    this holder does not hold it; nothing changed

-- #bind

local entry = redis.call('HGET', keys.crew, args.place)
if not entry or string.match(entry, '^(%S+) ') ~= args.holder then
  return {'unknown'}
end
redis.call('HDEL', keys.crew, args.place)
return {'released'}
