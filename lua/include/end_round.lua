-- Removes a round that its taker has in memory, or some of its parts. Returns false if there is no such round.
-- keys, request: see acknowledge.
local function end_round(keys, request)
  local round = redis.call('HGET', keys.taken, request.token)
  if not round then
    return false
  end
  if request.more or #request.round_removed > 0 then
    -- #include "even_when_full"
    -- Only then does it store anything.
    even_when_full(keys.taken)
  end
  if #keys.round_parts > 0 then
    -- #include "drop_strings"
    drop_strings(keys.round_parts)
  end
  if #request.round_removed > 0 then
    -- #include "extend_leases"
    for _, attempt in ipairs(request.round_removed) do
      redis.call('ZADD', keys.round_attempts, 0, attempt)
    end
    -- The keys of a private accumulator have an expiry, and this one may be new.
    extend_leases(redis.call('PTTL', keys.taken), keys.round_attempts)
  end
  if request.more then
    -- Parts of the round are gone, so it must not be handed out again. Its hashes stay until the last call: if the
    -- taker dies now, the cleanup finds the names of the remaining parts in them.
    redis.call('HSET', keys.taken, request.token, (string.gsub(round, '^%a+', 'acknowledged', 1)))
  else
    redis.call('HDEL', keys.taken, request.token)
    redis.call('UNLINK', keys.taken_sums, keys.taken_buffered, keys.taken_inline, keys.taken_workers)
  end
  return true
end
