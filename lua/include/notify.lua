-- Publishes a message. A script does this last, so a user who may not publish must not fail here: the caller would take
-- what was written for refused, and send it again. Nobody depends on messages, because whoever waits for one also asks
-- once a second.
local function notify(channel, message)
  redis.pcall('PUBLISH', channel, message)
end
