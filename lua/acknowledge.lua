-- Removes a round that its taker has in memory. Rounds of very many parts take several calls.
--
-- KEYS[1] redisacc:{NAME}:taken                 token -> the round that was granted to it
-- KEYS[2] redisacc:{NAME}:taken:TOKEN:sums      the hashes of the round
-- KEYS[3] redisacc:{NAME}:taken:TOKEN:parked
-- KEYS[4] redisacc:{NAME}:taken:TOKEN:small
-- KEYS[5] redisacc:{NAME}:taken:TOKEN:workers
-- KEYS[6..] redisacc:{NAME}:part:ID:K           parts of its parked gradients; some only get an expiry
-- ARGV[1] token                                 id of the take
-- ARGV[2] more                                  "1" if calls with further parts follow, else "0"
--
-- Replies:
-- {'acknowledged'}           done, or so far done
-- {'unknown'}                no such round: acknowledged before, recovered by somebody else, or deleted

-- #include "drop"

local taken, token, more = KEYS[1], ARGV[1], ARGV[2]

local text = redis.call('HGET', taken, token)
if not text then
  return {'unknown'}
end
drop({unpack(KEYS, 6)})
if more == '1' then
  -- From here on the round can't be handed out again: parts of it are gone. Its hashes stay until the last call, so
  -- that whoever cleans up after a taker that dies now still finds the names of the parts.
  redis.call('HSET', taken, token, (string.gsub(text, '^%a+', 'acknowledged', 1)))
else
  redis.call('HDEL', taken, token)
  redis.call('UNLINK', KEYS[2], KEYS[3], KEYS[4], KEYS[5])
end
return {'acknowledged'}
