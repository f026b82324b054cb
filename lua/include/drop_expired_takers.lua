-- #include "count_text"

-- Removes takers whose lease has expired from the head of the queue. Returns the token at its head: the given one,
-- another live taker's, or nil if the queue is empty. A call checks at most LIMIT takers, so that the script stays
-- short. If all of them have expired, it returns the last one that it removed, so that the caller waits and removes
-- more.
local function first_live_taker(queue_key, takers_key, token, now)
  -- A hundred took 50 microseconds when read and removed together, and 500 when read and removed one by one.
  local LIMIT = 100
  local head = redis.call('ZRANGE', queue_key, 0, 0)[1]
  if not head or head == token then
    return head
  end
  local tokens = redis.call('ZRANGE', queue_key, 0, LIMIT - 1)
  local entries = redis.call('HMGET', takers_key, unpack(tokens))
  local expired, live = {}, nil
  for i, queued in ipairs(tokens) do
    local lease_end = parse_count(string.match(entries[i] or '', '^%d%S* (%d+) '))
    if queued == token or (lease_end and lease_end >= now) then
      live = queued
      break
    end
    expired[i] = queued
  end
  if #expired > 0 then
    redis.call('ZREM', queue_key, unpack(expired))
    redis.call('HDEL', takers_key, unpack(expired))
  end
  if not live and #tokens == LIMIT then
    return expired[LIMIT]
  end
  return live
end
