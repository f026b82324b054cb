-- A count as text: tostring() would write 1e+15, and a count never reaches 2^53.
local function count_text(count)
  return string.format('%.0f', count)
end

-- The count that a text holds, or nil where it is no count (fifteen digits stay exact in a double).
local function parse_count(text)
  if type(text) == 'string' and #text <= 15 and string.match(text, '^%d+$') then
    return tonumber(text)
  end
  return nil
end
