-- #include "session_entry"
-- #include "extend_leases"
-- #include "announce"

-- Drops a gradient with this reply, whose first word is also the field of the record that counts such gradients.
-- Returns nil and the reply.
local function drop_gradient(keys, request, record, entry, reply)
  -- This raises if the field holds no number, before anything changes.
  redis.call('HINCRBY', keys.record, reply[1], 1)
  write_session(keys.sessions, request.session, entry, reply, request.worker)
  extend_leases(record.lease_ms, keys.sessions)
  announce(keys.record, string.format('%s step=%s count=%s local_step=%s worker=%s',
    reply[1], reply[2], reply[3], request.local_step, request.worker))
  return nil, reply
end
