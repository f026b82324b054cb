-- #include "begin_request"

-- Does the same with the keys `record` and `sessions`, and counts in the record how often requests arrive again.
-- Returns the entry; or nil and the reply.
local function begin_counted_request(keys, request)
  local entry, refusal, is_duplicate = begin_request(keys.sessions, request)
  if is_duplicate then
    redis.call('HINCRBY', keys.record, 'duplicates', 1)
  end
  return entry, refusal
end
