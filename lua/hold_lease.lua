-- Gives a lease in the crew of a training to a holder, or extends it.
--
-- KEYS crew      redisacc:{NAME}:crew   "chief" or "worker NUMBER" -> "holder lease_end_ms who"
-- ARGV place      text     which lease: "chief" or "worker NUMBER"
-- ARGV holder    text     random id of the holder; a process that is started again in the same place has the same
-- ARGV who       text     what people call the holder
-- ARGV lease_ms  number   how long the lease lasts unless the holder extends it
--
-- Replies:
-- {'held'}                     the caller holds the lease
-- {'taken', left_ms, who}      somebody else holds it, for that much longer unless it is extended
-- {'corrupt', where, text}     the entry holds what redisacc never writes; nothing changed

-- #include "now_ms"
-- #include "count_text"
-- #bind

-- For this long after the last extension of any lease, the hash says who is gone. Then it expires.
local KEPT_MS = 3600000

local now = now_ms()
local entry = redis.call('HGET', keys.crew, args.place)
if entry then
  local holder, lease_end, who = string.match(entry, '^(%S+) (%d+) (.*)$')
  lease_end = parse_count(lease_end)
  if not lease_end then
    return {'corrupt', 'crew', string.sub(entry, 1, 64)}
  end
  if holder ~= args.holder and lease_end > now then
    return {'taken', count_text(lease_end - now), string.sub(who, 1, 200)}
  end
end
redis.call('HSET', keys.crew, args.place, args.holder .. ' ' .. count_text(now + args.lease_ms) .. ' ' .. args.who)
redis.call('PEXPIRE', keys.crew, KEPT_MS)
return {'held'}
