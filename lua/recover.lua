-- Hands a round that was granted but not acknowledged to somebody new, who gets it under a token of its own. Its
-- former taker, should it still be alive, can no longer read or acknowledge it.
--
-- KEYS[1] redisacc:{NAME}                       the record
-- KEYS[2] redisacc:{NAME}:taken                 token -> the round that was granted to it
-- KEYS[3] redisacc:{NAME}:taken:OLD:sums        the hashes of the round under its old token
-- KEYS[4] redisacc:{NAME}:taken:OLD:parked
-- KEYS[5] redisacc:{NAME}:taken:OLD:small
-- KEYS[6] redisacc:{NAME}:taken:OLD:workers
-- KEYS[7] redisacc:{NAME}:taken:TOKEN:sums      and under its new one
-- KEYS[8] redisacc:{NAME}:taken:TOKEN:parked
-- KEYS[9] redisacc:{NAME}:taken:TOKEN:small
-- KEYS[10] redisacc:{NAME}:taken:TOKEN:workers
-- ARGV[1] incarnation                           the one that the handle opened
-- ARGV[2] old                                   the token to recover
-- ARGV[3] token                                 the new one; the same again gets the same round
-- ARGV[4] taker                                 name of who asks
--
-- Replies:
-- {'granted', global_step, num_accumulated, round_shape}   the step that it closed, and what it holds
-- {'unknown'}                                              no such round (any more)
-- {'missing'}                                              no such accumulator
-- {'replaced'}                                             it was deleted and created anew
-- {'corrupt', where, text}                                 something under our keys isn't ours; nothing changed

-- #include "read_record"
-- #include "granted_round"
-- #include "now_ms"
-- #include "announce"
-- #include "even_when_full"

local record_key, taken = KEYS[1], KEYS[2]
local incarnation, old, token, taker = ARGV[1], ARGV[2], ARGV[3], ARGV[4]

local record, refusal = read_record(record_key, incarnation, {'num_accumulated'})
if not record then
  return refusal
end
local reply = granted_round(taken, token)
if reply then
  return reply
end
reply = granted_round(taken, old)
if not reply then
  return {'unknown'}
elseif reply[1] ~= 'granted' then
  return reply
end

even_when_full(record_key)
for i = 3, 6 do
  if redis.call('EXISTS', KEYS[i]) == 1 then
    redis.call('RENAME', KEYS[i], KEYS[i + 4])
  end
end
redis.call('HDEL', taken, old)
redis.call('HSET', taken, token,
  string.format('granted %s %s %.0f %s %s', reply[2], reply[3], now_ms(), reply[4], taker))
announce(record_key, string.format('recovered step=%s count=%s taken=%s taker=%s',
  record.global_step, count_text(record.num_accumulated), reply[3], taker))
return reply
