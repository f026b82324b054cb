-- Gives the lease of the reducer of an accumulator, or of one of its partitions, to a holder, or extends it.
--
-- KEYS reducer   redisacc:{NAME}:reducer   or redisacc:{NAME}:reducer:p; a hash with an expiry: holder, who, stored,
--                                          late
-- ARGV holder    text     random id of the reducer
-- ARGV who       text     name of the reducer, for people: host and process id
-- ARGV stored    number   rounds whose whole sum the holder has stored before it was needed
-- ARGV late      number   rounds that were over before that
-- ARGV lease_ms  number   how long the lease lasts unless the holder extends it
--
-- Replies:
-- {'held'}         the caller holds the lease
-- {'taken', who}   another reducer holds it; nothing changed

-- #bind

local holder = redis.call('HGET', keys.reducer, 'holder')
if holder and holder ~= args.holder then
  return {'taken', string.sub(redis.call('HGET', keys.reducer, 'who') or '', 1, 200)}
end
redis.call('HSET', keys.reducer, 'holder', args.holder, 'who', args.who,
  'stored', string.format('%.0f', args.stored), 'late', string.format('%.0f', args.late))
redis.call('PEXPIRE', keys.reducer, args.lease_ms)
return {'held'}
