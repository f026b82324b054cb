-- #include "integer_text"
-- #include "count_text"
-- #include "parse_weight"

-- Counts that a record has only if the accumulator uses them, and what their absence means.
local ABSENT = {
  max_staleness = '0', grace_count = '0', grace_began_ms = '0', num_required = '0', up_to = '0', grace_ms = '0',
  losses = '0',
}

-- Reads the record of the incarnation that the caller opened: the step, the shape of the round, the sum of the weights
-- of its gradients (0 if all are 1), and the named counts.
-- Returns a table, or nil and the reply that says why the operation can't go on: {'missing'}, {'replaced'} or
-- {'corrupt', field, text}.
local function read_record(record_key, incarnation, names)
  local fields = redis.call('HMGET', record_key, 'incarnation', 'global_step', 'round_shape', 'total_weight',
    unpack(names))
  if fields[1] ~= incarnation then
    if fields[1] then
      return nil, {'replaced'}
    elseif redis.call('EXISTS', record_key) == 0 then
      return nil, {'missing'}
    end
    return nil, {'corrupt', 'incarnation', ''}
  end
  local record = {global_step = fields[2], round_shape = fields[3]}
  if not is_integer_text(record.global_step or '') then
    return nil, {'corrupt', 'global_step', string.sub(record.global_step or '', 1, 64)}
  end
  if not record.round_shape then
    return nil, {'corrupt', 'round_shape', ''}
  end
  record.total_weight = fields[4] and parse_weight(fields[4]) or 0
  if fields[4] and record.total_weight == 0 then
    return nil, {'corrupt', 'total_weight', string.sub(fields[4], 1, 64)}
  end
  for i, name in ipairs(names) do
    record[name] = parse_count(fields[i + 4] or ABSENT[name])
    if not record[name] then
      return nil, {'corrupt', name, string.sub(fields[i + 4] or '', 1, 64)}
    end
  end
  return record
end
