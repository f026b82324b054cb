-- #include "weight_text"

-- Returns the entry of a gradient in the `buffered` hash: "order header", or "order*weight header" if its weight is not
-- 1. The values are stored as they came, so readers multiply them. In a sum, the values already contain the weights.
local function buffered_entry(order, weight, request)
  local factor = (weight ~= 1 and #request.replaced == 0) and '*' .. weight_text(weight) or ''
  return order .. factor .. ' ' .. request.header
end
