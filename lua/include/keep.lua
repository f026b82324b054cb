-- Lets the keys of a private accumulator live one lease longer. Those of a shared one (lease_ms = 0) have no end.
local function keep(lease_ms, ...)
  if lease_ms > 0 then
    for _, key in ipairs({...}) do
      redis.call('PEXPIRE', key, lease_ms)
    end
  end
end
