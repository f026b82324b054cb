-- Returns a count as text. tostring() would write 1e+15; a count never reaches 2^53.
local function count_text(count)
  return string.format('%.0f', count)
end

local match = string.match

-- Returns the count that a text holds, or nil if it holds none, or if there is no text: nil or false. A double holds
-- fifteen digits exactly. Adding 0 and a local `match` make it a quarter faster, and every gradient has a dozen counts.
local function parse_count(text)
  if text and #text <= 15 and match(text, '^%d+$') then
    return text + 0
  end
  return nil
end
