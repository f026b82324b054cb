-- Returns the entry of a gradient in the `buffered` hash: "order header", or "order*weight header" if its weight is not
-- 1. The values are stored as they came, so readers multiply them. In a sum, the values already contain the weights.
local function buffered_entry(order, weight, request)
  local factor = ''
  if weight ~= 1 and #request.replaced == 0 then
    -- #include "weight_text"
    factor = '*' .. weight_text(weight)
  end
  return order .. factor .. ' ' .. request.header
end
