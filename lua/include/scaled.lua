-- Returns packed numbers multiplied by a factor. `element` is how struct packs each: 'f' or 'd'. For 'f', the factor is
-- rounded to float32 first: Lua's product of two float32 numbers is exact, and packing rounds it once, as a
-- multiplication in float32 does.
local function scaled(numbers, factor, element, element_bytes)
  local pack, take = struct.pack, struct.unpack
  local sixteen, one = '<' .. string.rep(element, 16), '<' .. element
  factor = take(one, pack(one, factor))
  local parts, n, position, stop = {}, 0, 1, #numbers
  while position + 16 * element_bytes - 1 <= stop do
    local a1, a2, a3, a4, a5, a6, a7, a8, a9, a10, a11, a12, a13, a14, a15, a16 = take(sixteen, numbers, position)
    n = n + 1
    parts[n] = pack(sixteen, a1 * factor, a2 * factor, a3 * factor, a4 * factor, a5 * factor, a6 * factor, a7 * factor,
      a8 * factor, a9 * factor, a10 * factor, a11 * factor, a12 * factor, a13 * factor, a14 * factor, a15 * factor,
      a16 * factor)
    position = position + 16 * element_bytes
  end
  while position <= stop do
    n = n + 1
    parts[n] = pack(one, take(one, numbers, position) * factor)
    position = position + element_bytes
  end
  return table.concat(parts)
end
