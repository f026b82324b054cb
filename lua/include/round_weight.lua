-- The field `total_weight` of the record is the sum of the weights of the gradients of the current round, in the order
-- in which they were admitted. It is absent while all of them have the weight 1, and record.total_weight is then 0.

-- Returns the sum of the weights.
local function round_weight(record)
  return record.total_weight > 0 and record.total_weight or record.num_accumulated
end
