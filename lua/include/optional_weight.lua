-- #include "parse_weight"

-- Returns a weight that a take has left in the record for the scripts that count gradients; 0 if there is none. Only
-- hints and the beginning of a grace depend on it.
local function optional_weight(record_key, name)
  return parse_weight(redis.call('HGET', record_key, name)) or 0
end
