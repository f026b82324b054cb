local clock_ms

-- Returns the server's clock in milliseconds since 1970: the only clock that all hosts share. It is read once.
local function now_ms()
  if not clock_ms then
    local time = redis.call('TIME')
    clock_ms = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
  end
  return clock_ms
end
