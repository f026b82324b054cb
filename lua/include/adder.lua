-- Returns a function that adds rows of packed numbers. add(a, i, b, j, bytes) returns the element-wise sum of `bytes`
-- bytes of a (from i) and of b (from j), packed again, or nil if a sum is outside [-limit, limit]. `element` is how
-- struct packs an element: 'f' or 'd'. Lua adds doubles, and for 'f' packing rounds the sum to float32. That equals an
-- addition in float32, because a double has more than twice as many digits.
--
-- It adds sixteen elements at a time, in locals: that took 8 to 20 % less time than eight at a time, and 30 % less than
-- tables and unpack().
local function adder(element, element_bytes, limit)
  local pack, take, max, min = struct.pack, struct.unpack, math.max, math.min
  local sixteen, one = '<' .. string.rep(element, 16), '<' .. element
  local step = 16 * element_bytes

  local function add_sixteen(a, i, b, j)
    local a1, a2, a3, a4, a5, a6, a7, a8, a9, a10, a11, a12, a13, a14, a15, a16 = take(sixteen, a, i)
    local b1, b2, b3, b4, b5, b6, b7, b8, b9, b10, b11, b12, b13, b14, b15, b16 = take(sixteen, b, j)
    a1, a2, a3, a4, a5, a6, a7, a8 = a1 + b1, a2 + b2, a3 + b3, a4 + b4, a5 + b5, a6 + b6, a7 + b7, a8 + b8
    a9, a10, a11, a12 = a9 + b9, a10 + b10, a11 + b11, a12 + b12
    a13, a14, a15, a16 = a13 + b13, a14 + b14, a15 + b15, a16 + b16
    if limit and (max(a1, a2, a3, a4, a5, a6, a7, a8, a9, a10, a11, a12, a13, a14, a15, a16) > limit
        or min(a1, a2, a3, a4, a5, a6, a7, a8, a9, a10, a11, a12, a13, a14, a15, a16) < -limit) then
      return nil
    end
    return pack(sixteen, a1, a2, a3, a4, a5, a6, a7, a8, a9, a10, a11, a12, a13, a14, a15, a16)
  end

  return function(a, i, b, j, bytes)
    if bytes == step then
      return add_sixteen(a, i, b, j)
    end
    local stop, parts, n = j + bytes, {}, 0
    while j + step <= stop do
      n = n + 1
      parts[n] = add_sixteen(a, i, b, j)
      if not parts[n] then
        return nil
      end
      i, j = i + step, j + step
    end
    while j < stop do
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
end
