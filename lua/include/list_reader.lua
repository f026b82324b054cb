-- Returns a function that reads lists which follow one another in `values` (KEYS or ARGV), beginning at `first`. Each
-- call returns the next `count` values as a table, or the rest of them if it is nil, every value passed through
-- `convert` if that is given. A loop, because unpack() fails from about 8,000 values on.
local function list_reader(values, first)
  local position = first
  return function(count, convert)
    local list = {}
    for i = 1, tonumber(count or #values - position + 1) do
      local value = values[position]
      list[i] = convert and convert(value) or value
      position = position + 1
    end
    return list
  end
end
