-- Publishes a message, if the user may. A script does this after it has written. If it failed here, the caller would
-- believe that nothing was written, and send the request again. A lost message only costs time, because those who wait
-- for it also ask once a second.
local function notify(channel, message)
  redis.pcall('PUBLISH', channel, message)
end
