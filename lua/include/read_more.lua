-- #include "read_record"

-- Reads further counts of a record that read_record has read. Returns nil, or a refusal. The last `num_optional` of
-- them may be absent.
local function read_more(record_key, record, names, num_optional)
  return read_counts(record, names, num_optional, redis.call('HMGET', record_key, unpack(names)), 0)
end
