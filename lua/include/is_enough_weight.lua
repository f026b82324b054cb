-- Returns whether a round has as much weight as a taker requires. Sums of weights are rounded: ten times 0.1 is less
-- than 1. So a sum that is just below the requirement is enough.
local function is_enough_weight(total, required)
  return total >= required * (1 - 1e-9)
end
