-- Returns a weight as the shortest text, from fifteen digits on, that is this double again.
local function weight_text(weight)
  local text
  for digits = 15, 17 do
    text = string.format('%.' .. digits .. 'g', weight)
    if tonumber(text) == weight then
      break
    end
  end
  return text
end
