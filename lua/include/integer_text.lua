-- Steps are int64 and remain text, because Lua's numbers are doubles and lose digits above 2^53.

-- Returns whether integer text a is less than integer text b.
local function integer_text_less(a, b)
  local a_negative, b_negative = string.sub(a, 1, 1) == '-', string.sub(b, 1, 1) == '-'
  if a_negative ~= b_negative then
    return a_negative
  end
  if #a ~= #b then
    return (#a < #b) ~= a_negative
  end
  if a_negative then
    return a > b
  end
  return a < b
end

local LAST_STEP = '9223372036854775807'

-- Returns whether a text is an int64 as Python and HINCRBY write it: no plus sign, no leading zero, no "-0".
local function is_integer_text(text)
  return text == '0' or (string.match(text, '^%-?[1-9]%d*$') ~= nil
    and not integer_text_less(LAST_STEP, text) and not integer_text_less(text, '-9223372036854775808'))
end
