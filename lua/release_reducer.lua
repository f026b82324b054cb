-- Gives back the lease of the reducer of an accumulator, or of one of its partitions.
--
-- KEYS reducer   redisacc:{NAME}:reducer   or redisacc:{NAME}:reducer:p; a hash with an expiry: holder, who, stored,
--                                          late
-- ARGV holder    text     random id of the reducer
--
-- Replies:
-- {'released'}   the lease is free
-- {'unknown'}    this reducer does not hold it; nothing changed

-- #bind

if redis.call('HGET', keys.reducer, 'holder') ~= args.holder then
  return {'unknown'}
end
redis.call('UNLINK', keys.reducer)
return {'released'}
