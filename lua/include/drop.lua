-- Removes strings. To free them takes the server some 30 microseconds for each MiB, even by UNLINK, which frees strings
-- on the spot; a script that freed many large ones would hold everybody up. What passes a budget gets an expiry:
-- the client removes those one by one, and if it dies they go by themselves.
local function drop(string_keys)
  local BUDGET_BYTES, LATER_MS = 4194304, 10000
  local now, bytes = {}, 0
  for _, key in ipairs(string_keys) do
    local size = redis.call('STRLEN', key)
    if bytes + size > BUDGET_BYTES then
      redis.call('PEXPIRE', key, LATER_MS)
    else
      bytes = bytes + size
      now[#now + 1] = key
    end
  end
  if #now > 0 then
    redis.call('UNLINK', unpack(now))
  end
end
