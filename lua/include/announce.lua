-- Says what happened. Everything goes to redisacc:{NAME}:events, for whoever looks on; a taker that waits is woken by
-- what concerns it only, on redisacc:{NAME}:wake: each time costs it more than a small gradient costs the server.
-- wake: the text that goes there, if any.
local function announce(record_key, text, wake)
  redis.call('PUBLISH', record_key .. ':events', text)
  if wake then
    redis.call('PUBLISH', record_key .. ':wake', wake)
  end
end
