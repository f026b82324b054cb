-- The field `total_weight` of the record is the sum of the weights of the gradients of the current round, in the order
-- in which they were admitted. It is absent while all of them have the weight 1, and record.total_weight is then 0.

-- Returns the sum of the weights.
local function round_weight(record)
  return record.total_weight > 0 and record.total_weight or record.num_accumulated
end

-- Returns whether a round has as much weight as a taker requires. Sums of weights are rounded: ten times 0.1 is less
-- than 1. So a sum that is just below the requirement is enough.
local function is_enough_weight(total, required)
  return total >= required * (1 - 1e-9)
end
