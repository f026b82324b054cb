-- Leaves the queue of takers, or reports the round if it was granted meanwhile.
--
-- KEYS record   redisacc:{NAME}          the record of the accumulator
-- KEYS queue    redisacc:{NAME}:queue    sorted set of tokens by ticket number
-- KEYS takers   redisacc:{NAME}:takers   token -> "required lease_end_ms taker"
-- KEYS taken    redisacc:{NAME}:taken    token -> the round that was granted to it
-- ARGV token    text   id of the take
-- ARGV confirm  flag   whether a WAIT follows, for replicas to confirm the round
--
-- Replies:
-- {'left'}                                                 the token is not in the queue
-- {'granted', global_step, num_accumulated, round_shape, staleness, total_weight}
--                                                          the round belongs to this token, and must be delivered;
--                                                          staleness is "" unless max_staleness > 0;
--                                                          total_weight is "" if all weights are 1
-- {'corrupt', where, text}                                 a key or field holds what redisacc never writes

-- #include "granted_round"
-- #include "announce"
-- #include "even_when_full"
-- #bind

local reply = granted_round(keys.taken, args.token)
if reply then
  if args.confirm then
    -- On Valkey, WAIT counts the replicas that have what its own connection wrote last. This may not be the connection
    -- that took the round, so the script writes as well: replicas that have this have the round, too.
    even_when_full(keys.record)
    redis.call('HSET', keys.taken, args.token, redis.call('HGET', keys.taken, args.token))
  end
  return reply
end
if redis.call('ZREM', keys.queue, args.token) == 1 then
  redis.call('HDEL', keys.takers, args.token)
  -- The next taker in the queue may now be served.
  announce(keys.record, 'left', 'left')
end
return {'left'}
