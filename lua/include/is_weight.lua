-- Weights are positive doubles, stored as text. They are bounded by the normal numbers of float32, so that each of
-- them, and each sum of them, is also a number in the type in which gradients are multiplied and divided by it.
local LEAST_WEIGHT, MOST_WEIGHT = 2 ^ -126, (2 - 2 ^ -23) * 2 ^ 127

local function is_weight(number)
  return number >= LEAST_WEIGHT and number <= MOST_WEIGHT
end
