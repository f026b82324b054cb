-- #include "read_record"

-- Reads further counts of a record that read_record has read. Returns nil, or a refusal.
local function read_more(record_key, record, names)
  return read_counts(record, names, redis.call('HMGET', record_key, unpack(names)), 0)
end
