-- Says what happened. Everything goes to redisacc:{NAME}:events, for whoever looks on; a taker that waits is woken by
-- what concerns it only, on redisacc:{NAME}:wake: each time costs it more than a small gradient costs the server.
local function announce(record_key, wake, text)
  redis.call('PUBLISH', record_key .. ':events', text)
  if wake then
    redis.call('PUBLISH', record_key .. ':wake', text)
  end
end
