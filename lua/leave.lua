-- Leaves the queue of takers, because of a timeout, an interrupt or a closed handle. A round that was granted
-- meanwhile is reported, so that it is delivered and not dropped.
--
-- KEYS[1] redisacc:{NAME}            the record
-- KEYS[2] redisacc:{NAME}:queue      sorted set of tokens by ticket number
-- KEYS[3] redisacc:{NAME}:takers     token -> "num_required lease_end_ms taker"
-- KEYS[4] redisacc:{NAME}:taken      token -> the round that was granted to it
-- ARGV[1] token                      id of the take
--
-- Replies:
-- {'left'}                                                 not in the queue (any more)
-- {'granted', global_step, num_accumulated, round_shape}   the round is this token's
-- {'corrupt', where, text}                                 something under our keys isn't ours; nothing changed

-- #include "granted_round"
-- #include "announce"

local record, queue, takers, taken = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local token = ARGV[1]

local reply = granted_round(taken, token)
if reply then
  return reply
end
if redis.call('ZREM', queue, token) == 1 then
  redis.call('HDEL', takers, token)
  -- Whoever stood behind may be served now.
  announce(record, 'left', 'left')
end
return {'left'}
