-- Returns the server's clock in milliseconds since 1970: the only clock that all hosts share.
local function now_ms()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end
