-- #include "extend_leases"

-- The client SETs large parts just before the script that counts them, each with an expiry.

-- A request that is sent again writes them again.
local function drop_parts(keys)
  for _, unused in ipairs({keys.place, keys.parts}) do
    if #unused > 0 then
      redis.call('UNLINK', unpack(unused))
    end
  end
end

-- Returns the reply {'unwritten', part} if a part is missing or has another length, else nil.
local function unwritten_part(part_keys, lengths)
  for k, part in ipairs(part_keys) do
    if redis.call('STRLEN', part) ~= lengths[k] then
      return {'unwritten', tostring(k)}
    end
  end
  return nil
end

-- Removes their expiry; those of a private accumulator have its lease from now on.
local function keep_parts(keys, lease_ms)
  if keys.place[1] then
    redis.call('UNLINK', keys.place[1])
  end
  for _, part in ipairs(keys.parts) do
    redis.call('PERSIST', part)
    extend_leases(lease_ms, part)
  end
end
