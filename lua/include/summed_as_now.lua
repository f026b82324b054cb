-- #include "weight_text"

-- Returns whether a sum that replaces gradients has the gradient of its request in it with the weight that this would
-- be admitted with now. The step may have moved since the sum was formed, and with it the staleness.
local function is_summed_as_now(weight, request)
  return #request.replaced == 0 or request.summed_weight == weight_text(weight)
end
