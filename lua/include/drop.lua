-- Removes strings. To free a large one takes the server some 30 microseconds for each MiB, even by UNLINK, which frees
-- strings on the spot; a script that freed many would hold everybody up. Those get an expiry instead: the client
-- removes them one by one, and if it dies they go by themselves.
local function drop(string_keys)
  local LARGE_BYTES, LATER_MS = 65536, 10000
  local small = {}
  for _, key in ipairs(string_keys) do
    if redis.call('STRLEN', key) > LARGE_BYTES then
      redis.call('PEXPIRE', key, LATER_MS)
    else
      small[#small + 1] = key
    end
  end
  if #small > 0 then
    redis.call('UNLINK', unpack(small))
  end
end
