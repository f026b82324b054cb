-- #include "integer_text"
-- #include "count_text"
-- #include "parse_weight"

-- Counts that a record has only if the accumulator uses them. Where they are absent, they are 0.
local OPTIONAL = {
  max_staleness = true, grace_count = true, grace_began_ms = true, num_required = true, up_to = true, grace_ms = true,
  losses = true,
}

-- Reads counts of the record into a table. Returns nil, or a refusal.
local function read_counts(record, names, fields, offset)
  for i, name in ipairs(names) do
    local text = fields[offset + i]
    if text or not OPTIONAL[name] then
      record[name] = parse_count(text)
      if not record[name] then
        return {'corrupt', name, string.sub(text or '', 1, 64)}
      end
    else
      record[name] = 0
    end
  end
  return nil
end

-- Reads the record of the incarnation that the caller opened: the step, the shape of the round, the sum of the weights
-- of its gradients (0 if all are 1), and the named counts.
-- Returns a table, or nil and the reply that says why the operation cannot continue: {'missing'}, {'replaced'} or
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
  local refusal = read_counts(record, names, fields, 4)
  if refusal then
    return nil, refusal
  end
  return record
end
