-- #include "read_record"
-- #include "begin_counted_request"
-- #include "extend_leases"
-- #include "accepted_staleness"
-- #include "announce"
-- #include "contribution"

-- Decides whether a gradient may be added; in place and buffered gradients share these rules. Returns the admission,
-- which count_gradient needs once the gradient is in; or nil and the reply.
--
-- keys: record, workers, sessions. request: incarnation, session, sequence, acknowledged, worker, local_step,
-- round_shape, own_step, notes, weight. is_buffered: whether the sizes of the buffered gradients are to be read, too.
local function admit(keys, request, is_buffered)
  local names = {'num_accumulated', 'applied', 'lease_ms', 'wanted', 'once_per_worker', 'max_staleness', 'grace_count'}
  if is_buffered then
    names = {'buffered_bytes', 'buffer_limit', unpack(names)}
  end
  local record, refusal = read_record(keys.record, request.incarnation, names, 2)
  if not record then
    return nil, refusal
  end
  local entry
  entry, refusal = begin_counted_request(keys, request)
  if not entry then
    return nil, refusal
  end
  local staleness = accepted_staleness(record, request)
  if not staleness then
    entry.stale = entry.stale + 1
    local reply = {'stale', record.global_step, count_text(record.num_accumulated)}
    -- #include "drop_gradient"
    return drop_gradient(keys, request, record, entry, reply)
  end
  local in_round, notes = read_contribution(keys.workers, request.worker)
  if not in_round then
    return nil, {'corrupt', 'workers', string.sub(request.worker, 1, 64)}
  end
  if in_round > 0 and record.once_per_worker > 0 then
    local reply = {'repeated', record.global_step, count_text(record.num_accumulated)}
    -- #include "drop_gradient"
    return drop_gradient(keys, request, record, entry, reply)
  end
  -- An empty round accepts every shape that the accumulator's declared shape allows, which the client has checked.
  if record.num_accumulated > 0 and record.round_shape ~= request.round_shape then
    return nil, {'shape_mismatch', record.round_shape}
  end
  local staleness_text
  if record.max_staleness > 0 then
    -- #include "count_staleness"
    staleness_text, refusal = count_staleness(keys.record, record, staleness)
    if not staleness_text then
      return nil, refusal
    end
  end
  local weight, total_weight = request.weight, 0
  if weight ~= 1 or record.max_staleness > 0 or record.total_weight > 0 then
    -- #include "effective_weight"
    -- #include "add_weight"
    weight, refusal = effective_weight(keys.record, record, weight, staleness)
    if weight then
      total_weight, refusal = add_weight(record, weight)
    end
    if refusal then
      return nil, refusal
    end
  end
  return {
    record = record, entry = entry, in_round = in_round, notes = notes, staleness = staleness,
    staleness_text = staleness_text, weight = weight, total_weight = total_weight,
  }
end

-- Counts a gradient that has just been added, announces it, and returns the reply. size: its bytes, which only the
-- event says. buffered_id: its id if it is buffered. The first taker in the queue is woken if enough gradients have
-- arrived, or if there is something to fetch ahead: the id `ahead` of that gradient, or "*" for all buffered ones.
local function count_gradient(keys, request, admission, size, buffered_id, ahead)
  local record, entry = admission.record, admission.entry
  local count = record.num_accumulated + 1
  local reply = {'applied', record.global_step, count_text(count)}
  entry.applied = entry.applied + 1
  redis.call('HSET', keys.record, 'num_accumulated', reply[3], 'applied', count_text(record.applied + 1),
    'round_shape', request.round_shape)
  if admission.staleness_text then
    redis.call('HSET', keys.record, 'staleness', admission.staleness_text)
  end
  local total = count
  if admission.total_weight > 0 then
    -- #include "weight_text"
    total = admission.total_weight
    redis.call('HSET', keys.record, 'total_weight', weight_text(total))
  end
  if record.grace_count > 0 and count >= record.grace_count then
    -- #include "optional_weight"
    -- #include "is_enough_weight"
    -- #include "round_weight"
    -- The grace of a take that requires as much begins with this gradient, even if no taker is waiting.
    local weight = optional_weight(keys.record, 'grace_weight')
    if is_enough_weight(total, weight)
      and not (count > record.grace_count and is_enough_weight(round_weight(record), weight)) then
      redis.call('HSET', keys.record, 'grace_began_ms', count_text(now_ms()))
    end
  end
  write_contribution(keys.workers, request.worker, admission.in_round + 1, admission.notes, request.notes)
  write_session(keys.sessions, request.session, entry, reply, request.worker)
  extend_leases(record.lease_ms, keys.sessions, keys.workers)
  local staleness, weight = '', ''
  if admission.staleness_text then
    staleness = string.format('staleness=%.0f ', admission.staleness)
  end
  if admission.weight ~= 1 then
    -- #include "weight_text"
    weight = 'weight=' .. weight_text(admission.weight) .. ' '
  end
  -- Joined, because string.format took more than twice as long.
  local message = 'applied step=' .. reply[2] .. ' count=' .. reply[3] .. ' bytes=' .. count_text(size) .. ' '
    .. staleness .. weight .. (buffered_id and 'buffered=' .. buffered_id .. ' ' or '') .. 'worker=' .. request.worker
  if ahead then
    announce(keys.record, message, string.format('applied step=%s count=%s buffered=%s', reply[2], reply[3], ahead))
  else
    local wakes = count >= record.wanted
    -- If no take has ever waited, `wanted` is 0.
    if wakes and record.wanted > 0 then
      -- #include "optional_weight"
      -- #include "is_enough_weight"
      wakes = is_enough_weight(total, optional_weight(keys.record, 'wanted_weight'))
    end
    announce(keys.record, message, wakes and message)
  end
  return reply
end
