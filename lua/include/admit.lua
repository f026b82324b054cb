-- #include "read_record"
-- #include "client_entry"
-- #include "keep"
-- #include "announce"

-- Everything that is decided before a gradient is added, the same for both ways of holding one. Returns the
-- admission, to be given to count_gradient once the gradient is in; or nil and the reply.
--
-- request: incarnation, client, sequence, worker, local_step, round_shape. more: further counts to read.
local function admit(keys, request, more)
  local record, refusal = read_record(keys.record, request.incarnation,
    {'num_accumulated', 'applied', 'lease_ms', 'wanted', unpack(more or {})})
  if not record then
    return nil, refusal
  end
  local entry, repeated
  entry, refusal, repeated = read_client(keys.clients, request.client, request.sequence)
  if not entry then
    if repeated then
      redis.call('HINCRBY', keys.record, 'duplicates', 1)
    end
    return nil, refusal
  end
  if integer_text_less(request.local_step, record.global_step) then
    local reply = {'stale', record.global_step, count_text(record.num_accumulated)}
    entry.stale = entry.stale + 1
    -- Raises, before anything changes, where this is no number.
    redis.call('HINCRBY', keys.record, 'stale', 1)
    write_client(keys.clients, request.client, entry, reply, request.worker)
    keep(record.lease_ms, keys.clients)
    announce(keys.record, string.format('stale step=%s count=%s local_step=%s worker=%s',
      reply[2], reply[3], request.local_step, request.worker))
    return nil, reply
  end
  -- An empty round is bound by nothing but the declared shape, which the client has checked.
  if record.num_accumulated > 0 and record.round_shape ~= request.round_shape then
    return nil, {'misshapen', record.round_shape}
  end
  local in_round = redis.call('HGET', keys.workers, request.worker)
  in_round = parse_count(in_round or '0')
  if not in_round then
    return nil, {'corrupt', 'workers', string.sub(request.worker, 1, 64)}
  end
  return {record = record, entry = entry, in_round = in_round}
end

-- Counts a gradient that has just been added, and says so, with the id of a parked one. Wakes the first of those who
-- wait if there are enough gradients now, or if there is something to fetch ahead: the id of that gradient, or "*" for
-- all that are parked. Returns the reply.
local function count_gradient(keys, request, admission, parked_id, ahead)
  local record, entry = admission.record, admission.entry
  local count = record.num_accumulated + 1
  local reply = {'applied', record.global_step, count_text(count)}
  entry.applied = entry.applied + 1
  redis.call('HSET', keys.record, 'num_accumulated', reply[3], 'applied', count_text(record.applied + 1),
    'round_shape', request.round_shape)
  redis.call('HSET', keys.workers, request.worker, count_text(admission.in_round + 1))
  write_client(keys.clients, request.client, entry, reply, request.worker)
  keep(record.lease_ms, keys.clients, keys.workers)
  local said = string.format('applied step=%s count=%s %sworker=%s',
    reply[2], reply[3], parked_id and 'parked=' .. parked_id .. ' ' or '', request.worker)
  if ahead then
    announce(keys.record, said, string.format('applied step=%s count=%s parked=%s', reply[2], reply[3], ahead))
  else
    announce(keys.record, said, count >= record.wanted and said)
  end
  return reply
end
