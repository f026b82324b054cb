-- Moves a round that was granted but not acknowledged from its token to a new one.
--
-- KEYS record        redisacc:{NAME}                        the record of the accumulator
-- KEYS taken         redisacc:{NAME}:taken                  token -> the round that was granted to it
-- KEYS recovered     redisacc:{NAME}:recovered              list of "OLD TOKEN recovered_ms taker"
-- KEYS old_sums      redisacc:{NAME}:taken:OLD:sums         the sums of the round under its old token
-- KEYS old_buffered  redisacc:{NAME}:taken:OLD:buffered     its buffered gradients
-- KEYS old_inline    redisacc:{NAME}:taken:OLD:inline       the data of its inline gradients
-- KEYS old_workers   redisacc:{NAME}:taken:OLD:workers      its workers
-- KEYS new_sums      redisacc:{NAME}:taken:TOKEN:sums       the same four hashes under the new token
-- KEYS new_buffered  redisacc:{NAME}:taken:TOKEN:buffered
-- KEYS new_inline    redisacc:{NAME}:taken:TOKEN:inline
-- KEYS new_workers   redisacc:{NAME}:taken:TOKEN:workers
-- ARGV incarnation   text   the incarnation that the handle opened
-- ARGV old           text   the token that holds the round now
-- ARGV token         text   the new token; the same one again gets the same round
-- ARGV taker         text   name of the new taker
--
-- Replies:
-- {'granted', global_step, num_accumulated, round_shape, staleness, total_weight}
--                                                          the step that the round closed, and its contents;
--                                                          staleness is "" unless max_staleness > 0;
--                                                          total_weight is "" if all weights are 1
-- {'unknown'}                                              there is no such round
-- {'missing'}                                              there is no such accumulator
-- {'replaced'}                                             the accumulator was deleted and created again
-- {'corrupt', where, text}                                 a key or field holds what redisacc never writes; nothing
--                                                          changed

-- #include "read_record"
-- #include "granted_round"
-- #include "granted_text"
-- #include "now_ms"
-- #include "announce"
-- #include "extend_leases"
-- #include "even_when_full"
-- #bind

-- The number of recoveries in the list, the latest one first. A former taker looks there for its round.
local REMEMBERED = 100

local record, refusal = read_record(keys.record, args.incarnation, {'num_accumulated', 'lease_ms'}, 0)
if not record then
  return refusal
end
local reply = granted_round(keys.taken, args.token)
if reply then
  if reply[1] == 'granted' then
    -- A WAIT may follow, over another connection than the first copy's: see leave.
    even_when_full(keys.record)
    redis.call('HSET', keys.taken, args.token, redis.call('HGET', keys.taken, args.token))
  end
  return reply
end
reply = granted_round(keys.taken, args.old)
if not reply then
  return {'unknown'}
elseif reply[1] ~= 'granted' then
  return reply
end

-- Reads come before writes: a key of another type raises here, while nothing has changed yet.
redis.call('LLEN', keys.recovered)
-- The keys change their names, so that the former taker, if it is still alive, can't read or acknowledge the round.
even_when_full(keys.record)
for _, move in ipairs({
  {keys.old_sums, keys.new_sums}, {keys.old_buffered, keys.new_buffered},
  {keys.old_inline, keys.new_inline}, {keys.old_workers, keys.new_workers},
}) do
  if redis.call('EXISTS', move[1]) == 1 then
    redis.call('RENAME', move[1], move[2])
  end
end
local now = now_ms()
redis.call('HDEL', keys.taken, args.old)
redis.call('HSET', keys.taken, args.token, granted_text(reply, now, args.taker))
redis.call('LPUSH', keys.recovered, string.format('%s %s %.0f %s', args.old, args.token, now, args.taker))
redis.call('LTRIM', keys.recovered, 0, REMEMBERED - 1)
extend_leases(record.lease_ms, keys.taken, keys.recovered)
announce(keys.record, string.format('recovered step=%s count=%s taken=%s taker=%s',
  record.global_step, count_text(record.num_accumulated), reply[3], args.taker))
return reply
