-- Gives up attempts whose lease is over, and lists the attempts whose parts are to be removed from the partitions.
--
-- KEYS attempts      redisacc:{NAME}:attempts   "ATTEMPT parts" -> end of its lease; 0: its parts are to be removed.
--                                               For parameters: redisacc:{NAME}:parameters:attempts
-- ARGV limit         number   how many attempts are listed at most
-- ARGV most_parts    number   how many parts an attempt may have
-- ARGV confirm       flag     whether a WAIT follows, for replicas to confirm that the attempts in the reply are over
-- ARGV abandoned...  text     "ATTEMPT parts" of attempts that their own writer gives up
-- ARGV removed...    text     "ATTEMPT parts" of attempts whose parts have been removed
--
-- Replies:
-- {'due', attempt...}   "ATTEMPT parts" of attempts whose parts are to be removed; commit and publish refuse them
--                       from now on

-- #include "now_ms"
-- #bind

-- Only attempts that are known here change: a gradient that was counted is not in the list any more, and a late copy of
-- this call finds nothing of it.

-- Removing parts drains a full server, so this script writes also then: see even_when_full. It removes a member that
-- never exists.
redis.call('ZREM', keys.attempts, '')
for _, attempt in ipairs(args.abandoned) do
  redis.call('ZADD', keys.attempts, 'XX', 0, attempt)
end
for _, attempt in ipairs(args.removed) do
  if tonumber(redis.call('ZSCORE', keys.attempts, attempt) or 1) == 0 then
    redis.call('ZREM', keys.attempts, attempt)
  end
end
local due = redis.call('ZRANGEBYSCORE', keys.attempts, 0, string.format('%.0f', now_ms()), 'LIMIT', 0, args.limit)
local reply = {'due'}
for _, attempt in ipairs(due) do
  local parts = #attempt <= 72 and string.match(attempt, '^[0-9a-z_-]+ (%d+)$')
  if parts and tonumber(parts) <= args.most_parts then
    if args.confirm then
      -- On Valkey, WAIT counts the replicas that have what its own connection wrote last, and setting the same score
      -- again writes nothing.
      redis.call('ZADD', keys.attempts, 'XX', 1, attempt)
    end
    redis.call('ZADD', keys.attempts, 'XX', 0, attempt)
    reply[#reply + 1] = attempt
  else
    -- redisacc did not write it, and it must not stand in the way of the others.
    redis.call('ZREM', keys.attempts, attempt)
  end
end
return reply
