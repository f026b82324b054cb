-- #include "count_text"

-- Removes takers whose lease has expired from the head of the queue. Returns the token at its head: the given one, that
-- of another live taker, or nil if the queue is empty. A call removes at most LIMIT takers, so that the script stays
-- short. If there are more, it returns the last one that it removed, so that the caller waits and removes more.
local function first_live_taker(queue_key, takers_key, token, now)
  local LIMIT = 100
  local head
  for _ = 1, LIMIT do
    head = redis.call('ZRANGE', queue_key, 0, 0)[1]
    if not head or head == token then
      return head
    end
    local lease_end = parse_count(string.match(redis.call('HGET', takers_key, head) or '', '^%d+ (%d+) '))
    if lease_end and lease_end >= now then
      return head
    end
    redis.call('ZREM', queue_key, head)
    redis.call('HDEL', takers_key, head)
  end
  return head
end
