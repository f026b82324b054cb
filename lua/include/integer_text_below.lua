-- #include "integer_text"

-- Returns the high part of an int64 as text, in units of 10^9, and the rest. Both have the sign of the number.
local function integer_parts(text)
  local is_negative = string.sub(text, 1, 1) == '-'
  local digits = is_negative and string.sub(text, 2) or text
  local high, low = tonumber(string.sub(digits, 1, -10)) or 0, tonumber(string.sub(digits, -9))
  if is_negative then
    return -high, -low
  end
  return high, low
end

-- Returns how far integer text a is below integer text b: 0 if it is not below. A distance of up to 10^9 is exact, and
-- a larger one remains larger than that.
local function integer_text_below(a, b)
  if not integer_text_less(a, b) then
    return 0
  end
  local a_high, a_low = integer_parts(a)
  local b_high, b_low = integer_parts(b)
  return (b_high - a_high) * 1000000000 + (b_low - a_low)
end
