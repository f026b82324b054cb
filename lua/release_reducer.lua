-- Gives back the lease of the reducer of an accumulator.
--
-- KEYS reducer   redisacc:{NAME}:reducer   hash: holder, who, since_ms, stored, late; with an expiry
-- ARGV holder    text     random id of the reducer
--
-- Replies:
-- {'released'}   nobody holds the lease any more
-- {'unknown'}    this reducer does not hold it; nothing changed

-- #bind

if redis.call('HGET', keys.reducer, 'holder') ~= args.holder then
  return {'unknown'}
end
redis.call('UNLINK', keys.reducer)
return {'released'}
