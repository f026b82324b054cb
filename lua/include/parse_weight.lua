-- #include "is_weight"

-- Returns the weight that a text holds, or nil if it holds none.
local function parse_weight(text)
  if type(text) == 'string' and #text <= 24 and string.match(text, '^%d[%d.e+-]*$') then
    local weight = tonumber(text)
    return weight and is_weight(weight) and weight or nil
  end
  return nil
end
