-- #include "integer_text"
-- #include "count_text"

-- Reads counts of the record into a table. Returns nil, or a refusal. The last `num_optional` of the names are fields
-- that a record has only if the accumulator uses them. Where they are absent, they are 0.
local function read_counts(record, names, num_optional, fields, offset)
  local num_always = #names - num_optional
  for i = 1, #names do
    local name, text = names[i], fields[offset + i]
    -- Most of them are 0, which needs no parsing.
    if text == '0' or (not text and i > num_always) then
      record[name] = 0
    else
      record[name] = parse_count(text)
      if not record[name] then
        return {'corrupt', name, string.sub(text or '', 1, 64)}
      end
    end
  end
  return nil
end

-- Reads the record of the incarnation that the caller opened: the step, the shape of the round, the sum of the weights
-- of its gradients (0 if all are 1), and the named counts, the last `num_optional` of which may be absent.
-- Returns a table, or nil and the reply that says why the operation cannot continue: {'missing'}, {'replaced'} or
-- {'corrupt', field, text}.
local function read_record(record_key, incarnation, names, num_optional)
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
  local record = {global_step = fields[2], round_shape = fields[3], total_weight = 0}
  if not is_integer_text(record.global_step or '') then
    return nil, {'corrupt', 'global_step', string.sub(record.global_step or '', 1, 64)}
  end
  if not record.round_shape then
    return nil, {'corrupt', 'round_shape', ''}
  end
  if fields[4] then
    -- #include "parse_weight"
    record.total_weight = parse_weight(fields[4])
    if not record.total_weight then
      return nil, {'corrupt', 'total_weight', string.sub(fields[4], 1, 64)}
    end
  end
  local refusal = read_counts(record, names, num_optional, fields, 4)
  if refusal then
    return nil, refusal
  end
  return record
end
