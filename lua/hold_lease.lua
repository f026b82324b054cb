-- Gives a lease in the crew of a training to a holder, or extends it.
--
-- KEYS record    redisacc:{NAME}
-- KEYS crew      redisacc:{NAME}:crew   "chief" or "worker NUMBER" -> "holder lease_end_ms process who"
-- ARGV place      text     which lease: "chief" or "worker NUMBER"
-- ARGV holder    text     random id of the holder; a process that is started again in the same place has the same
-- ARGV process   text     identity of the holder's process, which no other process ever has; without spaces
-- ARGV who       text     name of the holder, and how much memory it has, for people
-- ARGV lease_ms  number   how long the lease lasts unless the holder extends it
-- ARGV dead      text     identity of a process that is known to be dead, whose lease counts as run out; "" for none
-- ARGV renews    flag     whether the holder takes it only in an accumulator: it succeeds another one, or had it before
-- ARGV extends   flag     whether it only extends a lease that is there
--
-- Replies:
-- {'held'}                     the caller holds the lease
-- {'taken', left_ms, process, who}   somebody else holds it, for that much longer unless it is extended
-- {'missing'}                  there is no lease to extend, or no accumulator either; nothing changed
-- {'corrupt', where, text}     the entry holds what redisacc never writes; nothing changed

-- #include "now_ms"
-- #include "count_text"
-- #bind

-- For this long after the last extension of any lease, the hash says who is gone. Then it expires.
local KEPT_MS = 3600000

local now = now_ms()
local entry = redis.call('HGET', keys.crew, args.place)
if entry then
  local holder, lease_end, process, who = string.match(entry, '^(%S+) (%d+) (%S+) (.*)$')
  lease_end = parse_count(lease_end)
  if not lease_end then
    return {'corrupt', 'crew', string.sub(entry, 1, 64)}
  end
  if holder ~= args.holder and process ~= args.dead and lease_end > now then
    return {'taken', count_text(lease_end - now), string.sub(process, 1, 200), string.sub(who, 1, 200)}
  end
elseif args.extends or (args.renews and redis.call('EXISTS', keys.record) == 0) then
  -- The accumulator was deleted, or the server has lost it.
  -- A worker that waits for its chief takes a lease before there is one.
  return {'missing'}
end
redis.call('HSET', keys.crew, args.place,
  table.concat({args.holder, count_text(now + args.lease_ms), args.process, args.who}, ' '))
redis.call('PEXPIRE', keys.crew, KEPT_MS)
return {'held'}
