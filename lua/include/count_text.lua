-- Returns a count as text. tostring() would write 1e+15; a count never reaches 2^53.
local function count_text(count)
  return string.format('%.0f', count)
end

-- Returns the count that a text holds, or nil if it holds none. A double holds fifteen digits exactly.
local function parse_count(text)
  if type(text) == 'string' and #text <= 15 and string.match(text, '^%d+$') then
    return tonumber(text)
  end
  return nil
end
