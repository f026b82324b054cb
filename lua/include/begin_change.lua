-- #include "read_record"
-- #include "begin_counted_request"

-- Begins a request that changes the record. Returns the record and the entry of the session; or nil, nil and the reply.
local function begin_change(keys, args)
  local record, refusal = read_record(keys.record, args.incarnation, {'num_accumulated', 'lease_ms'}, 0)
  if not record then
    return nil, nil, refusal
  end
  local entry
  entry, refusal = begin_counted_request(keys, args)
  return entry and record, entry, refusal
end
