-- Removes strings. The server needs some 30 microseconds for each MiB that it frees, even with UNLINK, which frees
-- strings at once; a script that freed many large ones would delay every other client. Strings beyond a budget
-- therefore get an expiry: the client removes them one by one, and if it dies, they expire. sizes: the bytes of each
-- string if the caller has asked for them already.
local function drop_strings(string_keys, sizes)
  local BUDGET_BYTES, LATER_MS = 4194304, 10000
  local within_budget, bytes = {}, 0
  for n, key in ipairs(string_keys) do
    local size = sizes and sizes[n] or redis.call('STRLEN', key)
    if bytes + size > BUDGET_BYTES then
      redis.call('PEXPIRE', key, LATER_MS)
    else
      bytes = bytes + size
      within_budget[#within_budget + 1] = key
    end
  end
  if #within_budget > 0 then
    redis.call('UNLINK', unpack(within_budget))
  end
end
