-- Returns the weight with which a gradient is admitted: its sender's weight, multiplied by the factor for its staleness
-- that the field `staleness_weight` of the record names. Or nil and a reply if the field holds what redisacc never
-- writes. The field is absent if staleness does not matter; otherwise it is "inverse_sqrt", for 1/sqrt(1 + staleness).
local function effective_weight(record_key, record, weight, staleness)
  local rule = record.max_staleness > 0 and redis.call('HGET', record_key, 'staleness_weight')
  if not rule then
    return weight
  elseif rule == 'inverse_sqrt' then
    return weight * (1 / math.sqrt(1 + staleness))
  end
  return nil, {'corrupt', 'staleness_weight', string.sub(rule, 1, 64)}
end
