-- Removes a round that its taker has in memory, or some of its parts.
--
-- KEYS taken           redisacc:{NAME}:taken                  token -> the round that was granted to it
-- KEYS taken_sums      redisacc:{NAME}:taken:TOKEN:sums       the sums of the round
-- KEYS taken_buffered  redisacc:{NAME}:taken:TOKEN:buffered   its buffered gradients
-- KEYS taken_inline    redisacc:{NAME}:taken:TOKEN:inline     the data of its inline gradients
-- KEYS taken_workers   redisacc:{NAME}:taken:TOKEN:workers    its workers
-- KEYS attempts        redisacc:{NAME}:attempts               "ATTEMPT parts" -> 0: its parts are to be removed
-- KEYS parts...        redisacc:{NAME}:part:ID:K              parts of its buffered gradients; large ones get an expiry
-- ARGV token           text   id of the take
-- ARGV more            flag   whether calls with further parts follow, because the round has very many
-- ARGV attempts...     text   "ATTEMPT parts" of its gradients in partitions, whose parts the client then removes
--
-- Replies:
-- {'acknowledged'}   the round, or these parts of it, are removed
-- {'unknown'}        there is no such round: it was acknowledged before, recovered by another taker, or deleted

-- #bind

local round = redis.call('HGET', keys.taken, args.token)
if not round then
  return {'unknown'}
end
if args.more or #args.attempts > 0 then
  -- #include "even_when_full"
  -- Only then does it store anything.
  even_when_full(keys.taken)
end
if #keys.parts > 0 then
  -- #include "drop_strings"
  drop_strings(keys.parts)
end
if #args.attempts > 0 then
  -- #include "extend_leases"
  for _, attempt in ipairs(args.attempts) do
    redis.call('ZADD', keys.attempts, 0, attempt)
  end
  -- The keys of a private accumulator have an expiry, and this one may be new.
  extend_leases(redis.call('PTTL', keys.taken), keys.attempts)
end
if args.more then
  -- Parts of the round are gone, so it must not be handed out again. Its hashes stay until the last call: if the taker
  -- dies now, the cleanup finds the names of the remaining parts in them.
  redis.call('HSET', keys.taken, args.token, (string.gsub(round, '^%a+', 'acknowledged', 1)))
else
  redis.call('HDEL', keys.taken, args.token)
  redis.call('UNLINK', keys.taken_sums, keys.taken_buffered, keys.taken_inline, keys.taken_workers)
end
return {'acknowledged'}
