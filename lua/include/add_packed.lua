-- The element-wise sum of two packed rows of the same length, packed again. element is a letter of struct ('f' or
-- 'd'). Sums are formed in double; for 'f', packing rounds them to float32, which gives what float32 addition gives
-- (a double has more than twice its digits). Returns nil where a sum leaves [-limit, limit].
--
-- Eight at a time, in locals: tables and varargs cost more than the additions.
local function add_packed(a, b, from_a, element, element_bytes, limit)
  local eight = '<' .. string.rep(element, 8)
  local one = '<' .. element
  local step = 8 * element_bytes
  local pack, take = struct.pack, struct.unpack
  local parts, n = {}, 0
  local i, j, last = from_a, 1, #b
  while j + step - 1 <= last do
    local a1, a2, a3, a4, a5, a6, a7, a8 = take(eight, a, i)
    local b1, b2, b3, b4, b5, b6, b7, b8 = take(eight, b, j)
    a1, a2, a3, a4, a5, a6, a7, a8 = a1 + b1, a2 + b2, a3 + b3, a4 + b4, a5 + b5, a6 + b6, a7 + b7, a8 + b8
    if limit and (math.max(a1, a2, a3, a4, a5, a6, a7, a8) > limit
        or math.min(a1, a2, a3, a4, a5, a6, a7, a8) < -limit) then
      return nil
    end
    n = n + 1
    parts[n] = pack(eight, a1, a2, a3, a4, a5, a6, a7, a8)
    i, j = i + step, j + step
  end
  while j <= last do
    local sum = take(one, a, i) + take(one, b, j)
    if limit and (sum > limit or sum < -limit) then
      return nil
    end
    n = n + 1
    parts[n] = pack(one, sum)
    i, j = i + element_bytes, j + element_bytes
  end
  return table.concat(parts)
end
