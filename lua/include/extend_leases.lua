-- Extends the keys of a private accumulator by one lease. The keys of a shared one (lease_ms = 0) never expire.
local function extend_leases(lease_ms, ...)
  if lease_ms > 0 then
    for _, key in ipairs({...}) do
      redis.call('PEXPIRE', key, lease_ms)
    end
  end
end
