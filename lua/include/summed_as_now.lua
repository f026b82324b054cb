-- Returns whether a sum that replaces gradients has the gradient of its request in it with the weight that this would
-- be admitted with now. The step may have moved since the sum was formed, and with it the staleness. Lua and Python
-- write some numbers differently, so these are compared as numbers.
local function is_summed_as_now(weight, request)
  return #request.replaced == 0 or tonumber(request.summed_weight) == weight
end
