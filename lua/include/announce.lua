-- #include "notify"

-- Publishes an event. Every event goes to redisacc:{NAME}:events, for observers. Takers listen only to
-- redisacc:{NAME}:wake, because each message that wakes one costs it more than an inline gradient costs the server.
-- wake: the message that goes there, if any.
local function announce(record_key, message, wake)
  notify(record_key .. ':events', message)
  if wake then
    notify(record_key .. ':wake', wake)
  end
end
