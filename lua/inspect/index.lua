-- Prints the exact sum, count and mean of one index of the current round: what a take would return for it now.
--
-- KEYS record  redisacc:{NAME}   the record of the accumulator
-- ARGV leaf    text              of trees, the path of a leaf; otherwise, the index is the first argument
-- ARGV index   text              coordinates, separated by commas. Sparse: the index, then those in its row. Dense:
--                                coordinates of an element. Fewer coordinates than dimensions select all elements below
--                                them; "" selects all elements of a dense array
-- ARGV most    number?           the number of elements to print, from 1 to 1000; 16 if it is missing
--
-- Replies: lines of the form "what value", or an error.

-- A file of its own, without includes, for redis-cli:
--
--   redis-cli --raw --eval lua/inspect/index.lua 'redisacc:{NAME}' , 7        row 7
--   redis-cli --raw --eval lua/inspect/index.lua 'redisacc:{NAME}' , 7,3 1    element 3 of row 7
--   redis-cli --raw --eval lua/inspect/index.lua 'redisacc:{NAME}' , layers/0/w 7,3    of a leaf of a tree
--
-- It only reads, and loads nothing but the row. A sum in place is one HGET. In a buffered gradient it finds the index
-- by a search over the sorted indices, with GETRANGE if the gradient is large. It refuses if more than 200 gradients
-- are buffered (fewer, if they are trees with many sections), because searching all of them would hold the server for
-- too long; and likewise a tree whose structure is long. `redisacc show NAME` has no such bounds.
--
-- The other keys carry the same hash tag, and their names are formed here, because only the headers of the gradients
-- say which keys there are.

local record_key, leaf, index, most = KEYS[1] or '', ARGV[1] or '', ARGV[2], ARGV[3]

local MOST_ELEMENTS = 1000
-- A gradient costs as much time as this many of its sections, and all together may cost this much.
local GRADIENT_COST, MOST_COST = 14, 3000
-- The longest structure of a tree that is read, in bytes: about a thousand leaves.
local LONGEST_STRUCTURE = 32768
-- The most levels that a tree may have, and how many paths an error names.
local MOST_LEVELS, NAMED_PATHS = 64, 5
local TWO_32 = 4294967296

-- Every array of a buffered gradient begins at a multiple of this many bytes.
local ALIGNMENT = 8

-- Replaces what must not reach a terminal: control characters, and marks that change the direction of text (U+200E,
-- U+200F, U+202A to U+202E, U+2066 to U+2069).
local function safe(text)
  text = string.gsub(string.gsub(text, '%c', '?'), '\194[\128-\159]', '?')
  text = string.gsub(string.gsub(text, '\226\128[\142\143\170-\174]', '?'), '\226\129[\166-\169]', '?')
  return text
end

local function fail(...)
  error({err = 'ERR ' .. safe(string.format(...))}, 0)
end

-- Real numbers. Sums of "f" are rounded to float32 after each addition, as in numpy. struct does the rounding.

local function float32(x)
  return (struct.unpack('<f', struct.pack('<f', x)))
end

local function same(x)
  return x
end

-- Returns what rounds a number to this many binary digits: to the nearest one, and halfway cases to the even one.
-- `smallest` is the exponent of the smallest subnormal number, and `beyond` the first number that becomes infinite.
local function narrow(digits, smallest, beyond)
  return function(x)
    if x ~= x or x == 0 or x == math.huge or x == -math.huge then
      return x
    end
    local sign = x < 0 and -1 or 1
    local _, exponent = math.frexp(x)
    local unit = math.ldexp(1, math.max(exponent - digits, smallest))
    local scaled = math.abs(x) / unit
    local whole = math.floor(scaled + 0.5)
    if whole - scaled == 0.5 and whole % 2 == 1 then
      whole = whole - 1
    end
    local rounded = whole * unit
    return sign * (rounded >= beyond and math.huge or rounded)
  end
end

local function float16(data, at)
  local bits = struct.unpack('<I2', data, at)
  local sign = bits >= 32768 and -1 or 1
  local exponent, fraction = math.floor(bits / 1024) % 32, bits % 1024
  if exponent == 31 then
    return fraction == 0 and sign * math.huge or 0 / 0
  elseif exponent == 0 then
    return sign * math.ldexp(fraction, -24)
  end
  return sign * math.ldexp(1024 + fraction, exponent - 25)
end

local function bfloat16(data, at)
  return (struct.unpack('<f', '\0\0' .. string.sub(data, at, at + 1)))
end

-- Returns what writes a number with the fewest digits that distinguish it from its neighbours.
local function real_text(round, from, to)
  return function(x)
    if x ~= x then
      return 'nan'
    elseif x == math.huge or x == -math.huge then
      return x > 0 and 'inf' or '-inf'
    end
    local text
    for digits = from, to do
      text = string.format('%.' .. digits .. 'g', x)
      if round(tonumber(text)) == x then
        break
      end
    end
    return text
  end
end

local function reals(round, final, digits)
  return {
    from_sum = same,
    add = function(a, b) return round(a + b) end,
    multiply = function(a, weight) return round(a * round(weight)) end,
    divide = function(a, count) return round(a / round(count)) end,
    final = final, text = real_text(final == same and round or final, digits[1], digits[2]),
  }
end

-- Integers are {high, low}, the halves of a two's complement of 64 bits, because Lua's numbers are doubles and exact
-- only up to 2^53.

local function wide(x)
  return {math.floor(x / TWO_32) % TWO_32, x % TWO_32}
end

local function negated(a)
  return {(-a[1] - (a[2] > 0 and 1 or 0)) % TWO_32, -a[2] % TWO_32}
end

local function wide_text(a, signed)
  local sign = ''
  if signed and a[1] >= TWO_32 / 2 then
    sign, a = '-', negated(a)
  end
  local high, low, groups = a[1], a[2], {}
  repeat
    -- A long division by 10^6, because then a remainder times 2^32 stays below 2^53.
    local remainder = high % 1000000
    high = math.floor(high / 1000000)
    local rest = remainder * TWO_32 + low
    low = math.floor(rest / 1000000)
    table.insert(groups, 1, string.format('%06.0f', rest % 1000000))
  until high == 0 and low == 0
  local text = string.gsub(table.concat(groups), '^0+', '')
  return sign .. (text == '' and '0' or text)
end

local function integers(bits, signed)
  return {
    from_sum = function(x)
      if x ~= math.floor(x) or math.abs(x) > 9007199254740991 then
        fail('a sum in place is not an exact integer, so redisacc did not write it')
      end
      return wide(x)
    end,
    add = function(a, b)
      local low = a[2] + b[2]
      return {(a[1] + b[1] + (low >= TWO_32 and 1 or 0)) % TWO_32, low % TWO_32}
    end,
    -- An integer mean truncates toward zero.
    divide = function(a, count)
      if count >= 137438953472 then
        fail('the mean of 2^37 gradients or more is beyond this script: use `redisacc show NAME --index`')
      end
      -- Sums of narrower types are signed, even if the type isn't.
      local negative = (signed or bits < 64) and a[1] >= TWO_32 / 2
      if negative then
        a = negated(a)
      end
      local quotient, remainder = {0, 0}, 0
      for word = 1, 2 do
        for _, piece in ipairs({math.floor(a[word] / 65536), a[word] % 65536}) do
          local rest = remainder * 65536 + piece
          quotient[word] = quotient[word] * 65536 + math.floor(rest / count)
          remainder = rest % count
        end
      end
      return negative and negated(quotient) or quotient
    end,
    -- Wraps, as numpy does when it casts back.
    final = function(a)
      if bits == 64 then
        return a
      end
      local low = a[2] % 2 ^ bits
      return wide((signed and low >= 2 ^ (bits - 1)) and low - 2 ^ bits or low)
    end,
    text = function(a) return wide_text(a, signed) end,
  }
end

-- How each dtype is stored: the bytes of a number, and the function that reads one.

local function by_struct(bytes, letter)
  return {bytes = bytes, read = function(data, at) return (struct.unpack(letter, data, at)) end}
end

local function integer(bytes, letter)
  return {bytes = bytes, read = function(data, at) return wide((struct.unpack(letter, data, at))) end}
end

local function eight(data, at)
  local low, high = struct.unpack('<I4I4', data, at)
  return {high, low}
end

-- The elements in a block of the encoding int8: a scale, and an int8 for each element, by which it is multiplied. The
-- last block is filled up.
local BLOCK = 256
local in_blocks = {bytes = BLOCK + 4, elements = BLOCK}

local stored = {
  float32 = by_struct(4, '<f'), float64 = by_struct(8, '<d'), complex64 = by_struct(4, '<f'),
  complex128 = by_struct(8, '<d'), float16 = {bytes = 2, read = float16}, bfloat16 = {bytes = 2, read = bfloat16},
  int8 = integer(1, '<i1'), int16 = integer(2, '<i2'), int32 = integer(4, '<i4'), int64 = {bytes = 8, read = eight},
  uint8 = integer(1, '<I1'), uint16 = integer(2, '<I2'), uint32 = integer(4, '<I4'), uint64 = {bytes = 8, read = eight},
}

-- The sums of the section that says which leaves of a tree the gradients have: of numbers of gradients, or of weights.
local presence = reals(same, same, {15, 17})

-- Returns how elements of a dtype are added: the number of components, the type of sums in place, and the arithmetic.
local element_types = {}
local function element_type(name)
  if element_types[name] then
    return element_types[name]
  end
  local single, double = {6, 9}, {15, 17}
  local known = {
    float32 = {1, 'f', reals(float32, same, single)}, float64 = {1, 'd', reals(same, same, double)},
    complex64 = {2, 'f', reals(float32, same, single)}, complex128 = {2, 'd', reals(same, same, double)},
    float16 = {1, 'f', reals(float32, narrow(11, -24, 65536), {3, 9})},
    bfloat16 = {1, 'f', reals(float32, narrow(8, -133, 2 ^ 128), {2, 9})},
  }
  if not known[name] then
    local unsigned, bits = string.match(name, '^q?(u?)int(%d+)$')
    if not unsigned or not stored[unsigned .. 'int' .. bits] then
      fail('this script cannot read elements of the dtype %s', name)
    end
    known[name] = {1, 'd', integers(tonumber(bits), unsigned == '')}
  end
  element_types[name] = known[name]
  return known[name]
end

-- Buffered gradients.

-- Returns numbers that a header lists, or nil if they are not sizes; and their sum.
local function sizes(value)
  if type(value) ~= 'table' then
    return nil
  end
  local total = 0
  for _, size in ipairs(value) do
    if type(size) ~= 'number' or size < 0 or size ~= math.floor(size) then
      return nil
    end
    total = total + size
  end
  return value, total
end

-- How elements of float32 are stored that were encoded.
local encoded = {bfloat16 = stored.bfloat16, int8 = in_blocks}

-- Returns how the values of a section are stored and how many rows it has, if that fits what the section is.
local function described(listed, section)
  local how = type(listed) == 'table' and (section.dtype == 'float32' and encoded[listed[1]] or stored[listed[1]])
  local shape = how and sizes(listed[2])
  if not shape then
    return nil
  end
  local rows = section.sparse and shape[1] or 1
  local before = section.sparse and 1 or 0
  if not rows or #shape ~= #section.dims + before then
    return nil
  end
  for axis, dim in ipairs(section.dims) do
    if shape[axis + before] ~= dim then
      return nil
    end
  end
  return how, rows
end

-- Parses a header: finds where each section lies in the bytes of the gradient. Checks that the header fits the sections
-- and its parts, because anyone may have written it.
local function parse(id, entry, sections)
  local order, weight, packed = string.match(entry, '^(%d+)%*?([%d.e+-]*) (.*)$')
  local function foreign()
    fail('gradient %s has a header that redisacc did not write', id)
  end
  local ok, header = pcall(cmsgpack.unpack, packed or '')
  -- A sum of version 3 has weights in its values.
  local weighted = type(header) == 'table' and header.version == 3
  if not ok or type(header) ~= 'table' or (header.version ~= 2 and not weighted) or type(header.sections) ~= 'table'
      or #header.sections ~= #sections or type(header.gradients) ~= 'number' or header.gradients < 1
      or (weighted and type(header.weight) ~= 'number') or (weight ~= '' and not tonumber(weight)) then
    foreign()
  end
  local stop, placed = 0, {}
  local function place(bytes)
    local start = bytes > 0 and math.ceil(stop / ALIGNMENT) * ALIGNMENT or stop
    stop = start + bytes
    return start
  end
  -- The sparse sections come before the dense ones.
  for _, sparse in ipairs({true, false}) do
    for number, section in ipairs(sections) do
      if section.sparse == sparse then
        local how, rows = described(header.sections[number], section)
        if not how then
          foreign()
        end
        local summed = sparse and header.gradients > 1
        placed[number] = {
          how = how, rows = rows, summed = summed, indices = place(sparse and rows * 8 or 0),
          counts = place(summed and rows * 8 or 0),
          values = place(math.ceil(rows * section.elements * section.components / (how.elements or 1)) * how.bytes),
        }
      end
    end
  end
  local parts, total = sizes(header.parts)
  if not parts or (#parts > 0 and total ~= stop) then
    foreign()
  end
  local starts, start = {}, 0
  for number, length in ipairs(parts) do
    if length == 0 then
      foreign()
    end
    starts[number] = start
    start = start + length
  end
  local factor = tonumber(weight) or 1
  return {id = id, order = tonumber(order), number = header.gradients, factor = factor, weighted = weighted,
    weight = weighted and header.weight or header.gradients * factor, sections = placed, bytes = stop, parts = parts,
    starts = starts}
end

-- Returns all bytes of an inline gradient, because a field of a hash can't be read in pieces.
local function inline_data(gradient)
  if not gradient.data then
    local data = redis.call('HGET', record_key .. ':inline', gradient.id) or ''
    if #data ~= gradient.bytes then
      fail('%s:inline %s is gone, or has another length: it was evicted or removed by hand', record_key, gradient.id)
    end
    gradient.data = data
  end
  return gradient.data
end

-- Returns the number of the part that holds a byte.
local function part_of(gradient, byte)
  local low, high = 1, #gradient.parts
  while low < high do
    local middle = math.ceil((low + high) / 2)
    if gradient.starts[middle] <= byte then
      low = middle
    else
      high = middle - 1
    end
  end
  return low
end

-- Returns bytes of a gradient. They may span several parts.
local function bytes_of(gradient, from, length)
  if #gradient.parts == 0 then
    return string.sub(inline_data(gradient), from + 1, from + length)
  end
  if redis.call('HGET', record_key, 'partitions') then
    fail('gradient %s has its parts in partitions, which no script can read: use `redisacc show`', gradient.id)
  end
  local pieces, stop = {}, from + length
  local part = part_of(gradient, from)
  while from < stop do
    local start = gradient.starts[part]
    local last = math.min(stop, start + gradient.parts[part])
    local key = string.format('%s:part:%s:%d', record_key, gradient.id, part - 1)
    local piece = redis.call('GETRANGE', key, string.format('%.0f', from - start),
      string.format('%.0f', last - 1 - start))
    if #piece ~= last - from then
      fail('%s is gone, or too short: it was evicted or removed by hand', key)
    end
    pieces[#pieces + 1] = piece
    from, part = last, part + 1
  end
  return table.concat(pieces)
end

-- Returns the place of an index among those of a section, from 0, or nil. Every other guess halves the remaining
-- range, so that the search is short for any indices. The other guesses interpolate between the values, which finds
-- evenly spread indices in a few reads.
local function find(gradient, section, wanted)
  local function read(place)
    local found = eight(bytes_of(gradient, section.indices + place * 8, 8), 1)
    return found, found[1] * TWO_32 + found[2]
  end
  local low, high = 0, section.rows - 1
  if high < 0 then
    return nil
  end
  local target, halve = wanted[1] * TWO_32 + wanted[2], false
  local least, greatest = select(2, read(low)), select(2, read(high))
  while low <= high do
    local guess = math.floor((low + high) / 2)
    if not halve and greatest > least then
      guess = low + math.floor((high - low) * ((target - least) / (greatest - least)))
      guess = math.max(low, math.min(high, guess))
    end
    halve = not halve
    local found, value = read(guess)
    if found[1] == wanted[1] and found[2] == wanted[2] then
      return guess
    elseif found[1] < wanted[1] or (found[1] == wanted[1] and found[2] < wanted[2]) then
      low, least = guess + 1, value
    else
      high, greatest = guess - 1, value
    end
  end
  return nil
end

local function parse_index(text)
  local high, low = 0, 0
  for digit in string.gmatch(text, '%d') do
    low = low * 10 + tonumber(digit)
    high = high * 10 + math.floor(low / TWO_32)
    low = low % TWO_32
    if high >= TWO_32 / 2 then
      fail('index %s is above 2^63 - 1', text)
    end
  end
  return {high, low}
end

-- Returns which elements of an array the coordinates select: the place of the first, and their number.
local function span(coordinates, dims)
  if #coordinates > #dims then
    fail('got %d coordinates for %d dimensions', #coordinates, #dims)
  end
  local first, number = 0, 1
  for axis, dim in ipairs(dims) do
    local coordinate = coordinates[axis]
    if coordinate and coordinate >= dim then
      fail('coordinate %.0f is outside a dimension of size %.0f', coordinate, dim)
    end
    first = first * dim + (coordinate or 0)
    number = number * (coordinate and 1 or dim)
  end
  return first, number
end

-- Returns all buffered gradients, in the order of their places.
local function buffered_gradients(sections)
  local buffered_key = record_key .. ':buffered'
  local number = redis.call('HLEN', buffered_key)
  local most_buffered = math.floor(MOST_COST / (GRADIENT_COST + #sections))
  if number > most_buffered then
    fail('%d gradients are buffered, and this script searches at most %d: use `redisacc show NAME --index`', number,
      most_buffered)
  end
  local entries, gradients = redis.call('HGETALL', buffered_key), {}
  for i = 1, #entries, 2 do
    gradients[#gradients + 1] = parse(entries[i], entries[i + 1], sections)
  end
  table.sort(gradients, function(a, b) return a.order < b.order end)
  return gradients
end

-- Returns elements that are stored in blocks, given the place of the first. It is packed as float32, as the encoded
-- elements are before they are added.
local function widened(gradient, of, first, shown)
  local low, high = math.floor(first / BLOCK), math.floor((first + shown - 1) / BLOCK)
  local data = bytes_of(gradient, of.values + low * in_blocks.bytes, (high - low + 1) * in_blocks.bytes)
  local elements = {}
  for place = first, first + shown - 1 do
    local start = (math.floor(place / BLOCK) - low) * in_blocks.bytes
    local scale = struct.unpack('<f', data, start + 1)
    if not (scale >= 0 and scale < 2 ^ 122) then
      fail('gradient %s has a block whose scale is %g, so redisacc did not write it', gradient.id, scale)
    end
    elements[#elements + 1] = struct.pack('<f', scale * struct.unpack('<i1', data, start + 5 + place % BLOCK))
  end
  return table.concat(elements)
end

-- The bounds of what redisacc writes as a weight.
local LEAST_WEIGHT, MOST_WEIGHT = 2 ^ -126, (2 - 2 ^ -23) * 2 ^ 127

-- Adds up elements of a section, as a take does: the buffered gradients first, in the order of their places, and then
-- the sums in place.
--
-- `row` is the index of a row as text, or nil for a dense section. `first` is the place of the first element in the row
-- or section. `by_weights` says whether a mean divides by weights, and one of them differs from 1. Returns the sum of
-- each component, how many gradients are in it, those added in place and those buffered, and the sum of their weights.
-- Buffered sums have weights instead of numbers for each row, if they have weights at all.
local function add_up(gradients, sections, number, row, first, shown, chunk, by_weights)
  local section = sections[number]
  local components, packed_as, arithmetic = section.components, section.packed_as, section.arithmetic
  local total, in_place, buffered, weights = {}, 0, 0, 0
  local function add(data, how, convert, from)
    for i = 1, #data / how.bytes do
      local value = convert(how.read(data, (i - 1) * how.bytes + 1))
      local at = from + i
      total[at] = total[at] and arithmetic.add(total[at], value) or value
    end
  end

  local wanted = row and parse_index(row)
  for _, gradient in ipairs(gradients) do
    local of = gradient.sections[number]
    local place = not row and 0 or find(gradient, of, wanted)
    if place then
      local held, weight = gradient.number, gradient.weight
      if row and of.summed then
        local has_weights = gradient.weighted and by_weights
        held = struct.unpack(has_weights and '<d' or '<I8', bytes_of(gradient, of.counts + place * 8, 8))
        weight = held
      end
      buffered = buffered + held
      weights = weights + weight
      local function convert(value)
        value = section.from_stored(value)
        -- A mean by number divides a leaf by the number of gradients that have it.
        local is_plain = gradient.factor == 1 or (section.prefix == 'present:' and not by_weights)
        return is_plain and value or arithmetic.multiply(value, gradient.factor)
      end
      local from = place * section.elements + first
      if of.how == in_blocks then
        add(shown > 0 and widened(gradient, of, from, shown) or '', stored.float32, convert, 0)
      else
        local element = of.how.bytes * components
        add(bytes_of(gradient, of.values + from * element, shown * element), of.how, convert, 0)
      end
    end
  end

  local how = packed_as == 'f' and stored.float32 or stored.float64
  local element = how.bytes * components
  local from, stop = first, first + shown
  local in_place_weight
  repeat
    local base = row and 0 or math.floor(from / chunk) * chunk
    local next_chunk = row and stop or math.min(base + chunk, stop)
    local field = section.prefix .. (row and string.gsub(row, '^0+(%d)', '%1') or string.format('%.0f', base / chunk))
    local packed = redis.call('HGET', record_key .. ':sums', field)
    if packed then
      -- A row begins with the number of gradients that held it, in 7 bytes, and with its form: 0, or 1 if the sum of
      -- their weights follows.
      local elements = row and section.elements or math.min(chunk, section.elements - base)
      local head = #packed - elements * element
      local form = string.byte(packed, 8)
      if not (head == 8 and form == 0) and not (head == 16 and form == 1) then
        fail('row %s of the sums has %d bytes, so redisacc did not write it', field, #packed)
      end
      local data = string.sub(packed, head + 1 + (from - base) * element, head + (next_chunk - base) * element)
      in_place = struct.unpack('<I7', packed)
      in_place_weight = head == 16 and struct.unpack('<d', packed, 9) or in_place
      if not (in_place_weight >= LEAST_WEIGHT and in_place_weight <= MOST_WEIGHT) then
        fail('row %s of the sums has the weight %g, so redisacc did not write it', field, in_place_weight)
      end
      add(data, how, arithmetic.from_sum, (from - first) * components)
    end
    from = next_chunk
  until from >= stop
  return total, in_place, buffered, weights + (in_place_weight or 0)
end

-- Returns a section: whether it is sparse, its dtype, and its dimensions, or those of its rows. `prefix` begins its
-- fields in the sums.
local function section_of(sparse, dtype, dims, prefix)
  local components, packed_as, arithmetic = unpack(element_type(dtype))
  local elements = 1
  for _, dim in ipairs(dims) do
    elements = elements * dim
  end
  return {sparse = sparse, dtype = dtype, dims = dims, elements = elements, components = components,
    packed_as = packed_as, arithmetic = arithmetic, from_stored = same, prefix = prefix}
end

-- Trees.

-- Calls `visit` with the path and the description of each leaf, in their order. The structure is JSON: objects and
-- lists of texts. A tuple is a list that begins with "tuple". There are no escapes but \" and \\, because keys have no
-- control characters.
local function each_leaf(structure, visit)
  local at = 1
  local function foreign()
    fail('%s: tree holds what redisacc did not write', record_key)
  end
  local function read_text()
    local first, stop = at + 1, at
    local byte
    repeat
      stop = string.find(structure, '["\\]', stop + 1)
      byte = stop and string.byte(structure, stop)
      if not byte then
        foreign()
      elseif byte ~= 34 then
        stop = stop + 1
      end
    until byte == 34
    at = stop + 1
    return (string.gsub(string.sub(structure, first, stop - 1), '\\(.)', '%1'))
  end
  local function read_node(path, levels)
    local opening = string.sub(structure, at, at)
    if opening == '"' then
      visit(path == '' and '.' or path, read_text())
    elseif opening == 'n' and string.sub(structure, at, at + 3) == 'null' then
      at = at + 4
    elseif (opening == '{' or opening == '[') and levels <= MOST_LEVELS then
      local closing, place = opening == '{' and '}' or ']', 0
      local before = path == '' and '' or path .. '/'
      at = at + 1
      if opening == '[' and string.sub(structure, at, at + 6) == '"tuple"' then
        at = at + 7
      end
      while string.sub(structure, at, at) ~= closing do
        if string.sub(structure, at, at) == ',' then
          at = at + 1
        end
        local key = string.format('%d', place)
        if opening == '{' then
          if string.sub(structure, at, at) ~= '"' then
            foreign()
          end
          key = read_text()
          if string.sub(structure, at, at) ~= ':' then
            foreign()
          end
          at = at + 1
        end
        read_node(before .. key, levels + 1)
        place = place + 1
      end
      at = at + 1
    else
      foreign()
    end
  end
  read_node('', 1)
end

-- Returns the message that there is no leaf of a path, with paths that begin with it, or else with the first of all.
local function no_leaf(path, paths)
  local below = {}
  for _, other in ipairs(paths) do
    if string.sub(other, 1, #path + 1) == path .. '/' then
      below[#below + 1] = other
    end
  end
  local listed = #below > 0 and below or paths
  local more = #listed > NAMED_PATHS and string.format(' and %d more', #listed - NAMED_PATHS) or ''
  return string.format('the tree has no leaf with the path "%s"; %s %s%s', string.sub(path, 1, 100),
    #below > 0 and 'below it are' or 'there are', table.concat(listed, ', ', 1, math.min(#listed, NAMED_PATHS)), more)
end

-- Returns the sections of a tree, and where a leaf is in them: the number of its section, the place of its first
-- element there, its dimensions (of a sparse leaf: those of a row), its description and its number, from 0.
local function read_tree(path, missing)
  local length = redis.call('HSTRLEN', record_key, 'tree')
  if length > LONGEST_STRUCTURE then
    fail('the structure of this tree has %d bytes, and this script reads at most %d: use `redisacc show NAME --leaf`',
      length, LONGEST_STRUCTURE)
  end
  local sections, dense, paths, found = {}, {}, {}, nil
  each_leaf(redis.call('HGET', record_key, 'tree') or '', function(name, text)
    local dtype, shape = string.match(text, '(%w+) %[([%d,-]*)%]$')
    local sparse = string.sub(text, 1, 7) == 'sparse '
    if not dtype then
      fail('%s: tree holds what redisacc did not write', record_key)
    end
    local dims, size = {}, 1
    for dim in string.gmatch(sparse and (string.gsub(shape, '^[^,]*,?', '')) or shape, '%d+') do
      dims[#dims + 1] = tonumber(dim)
      size = size * tonumber(dim)
    end
    local number, start = dense[dtype], 0
    if sparse then
      number = #sections + 1
      sections[number] = section_of(true, dtype, dims, 'sparse:' .. name .. ':')
    else
      if not number then
        number = #sections + 1
        dense[dtype] = number
        sections[number] = section_of(false, dtype, {0}, 'dense:' .. dtype .. ':')
      end
      local section = sections[number]
      start = section.elements
      section.elements = start + size
      section.dims[1] = section.elements
    end
    paths[#paths + 1] = name
    if name == path then
      found = {section = number, start = start, dims = dims, text = text, number = #paths - 1}
    end
  end)
  if not found then
    fail('%s', no_leaf(path, paths))
  end
  if missing == 'skip' then
    local present = section_of(false, 'int32', {#paths}, 'present:')
    present.arithmetic = presence
    present.from_stored = function(value)
      return type(value) == 'table' and value[1] * TWO_32 + value[2] or value
    end
    sections[#sections + 1] = present
  end
  return sections, found
end

local function main()
  if not (rawget(_G, 'struct') and rawget(_G, 'cmsgpack')) then
    fail("this server's Lua has no struct or no cmsgpack: use `redisacc show NAME --index`")
  end
  local kind, dtype, round_shape, step, accumulated, chunk, sparse_mean, missing, normalize, total_weight = unpack(
    redis.call('HMGET', record_key, 'kind', 'dtype', 'round_shape', 'global_step', 'num_accumulated', 'chunk',
      'sparse_mean', 'missing', 'normalize', 'total_weight'))
  -- The field is absent while all weights are 1.
  local by_weights = total_weight and normalize ~= 'count'
  chunk = tonumber(chunk)
  if not (kind and dtype and round_shape and step and accumulated and chunk) then
    fail('there is no accumulator %s; SMEMBERS redisacc:names lists them', record_key)
  end
  if kind ~= 'tree' then
    leaf, index, most = nil, leaf, index
  end
  index, most = index or '', tonumber(most or '16')
  if index ~= '' and (string.match(index, '[^%d,]') or string.match(',' .. index .. ',', ',,')
      or string.match(index, string.rep('%d', 20))) then
    fail('the index must be whole numbers separated by commas, not %s', index)
  end
  if not most or most ~= math.floor(most) or most < 1 or most > MOST_ELEMENTS then
    fail('the number of elements to print must be a whole number, 1 to %d', MOST_ELEMENTS)
  end

  local sections, found
  if leaf then
    sections, found = read_tree(leaf, missing)
  else
    local dims = {}
    for dim in string.gmatch(round_shape, '%d+') do
      dims[#dims + 1] = tonumber(dim)
    end
    sections = {section_of(kind == 'sparse', dtype, dims, '')}
    found = {section = 1, start = 0, dims = dims}
  end
  local section = sections[found.section]
  if section.sparse and index == '' then
    fail('a sparse %s needs an index', leaf and 'leaf' or 'accumulator')
  end
  local lines = {}
  local function say(...)
    lines[#lines + 1] = safe(string.format(...))
  end
  say('accumulator %s %s %s', record_key, kind, dtype)
  if leaf then
    say('leaf %s %s', leaf, found.text)
  end
  say('index %s', index == '' and 'all' or index)
  say('step %s', step)
  say('gradients %s', accumulated)
  if accumulated == '0' then
    say('count 0')
    return lines
  end

  local row = section.sparse and string.match(index, '^%d+') or nil
  local coordinates = {}
  for coordinate in string.gmatch(row and string.sub(index, #row + 1) or index, '%d+') do
    coordinates[#coordinates + 1] = tonumber(coordinate)
  end
  local first, number = span(coordinates, found.dims)
  local shown = math.min(number, most)
  local gradients = buffered_gradients(sections)
  local total, in_place, buffered, weight = add_up(gradients, sections, found.section, row, found.start + first, shown,
    chunk, by_weights)
  local count = in_place + buffered
  if in_place > tonumber(accumulated) then
    fail('a row of the sums has %.0f gradients, but the round has %s', in_place, accumulated)
  end
  if not section.sparse and number > 0 and count ~= tonumber(accumulated) then
    fail('only %.0f of %s gradients were found: keys were evicted or removed by hand', count, accumulated)
  end
  -- How many gradients have the leaf, or the sum of their weights.
  local holders = tonumber(by_weights and total_weight or accumulated)
  if leaf and missing == 'skip' then
    local present = add_up(gradients, sections, #sections, nil, found.number, 1, chunk, by_weights)[1] or 0
    holders = math.min(present, holders)
    say('present %s', presence.text(holders))
  end
  if by_weights then
    count = weight
  end
  if not section.sparse then
    count = holders
  end
  if by_weights then
    say('weight %s', presence.text(count))
  else
    say('count %.0f', count)
    say('held in place %.0f, buffered %.0f', in_place, buffered)
  end
  if count == 0 then
    return lines
  end
  say('elements %d of %.0f', shown, number)
  local divisor = (section.sparse and sparse_mean ~= 'round') and count or holders
  local arithmetic, components = section.arithmetic, section.components
  local sums, means = {}, {}
  local function write(into, values, at)
    local one = arithmetic.text(arithmetic.final(values(total[at])))
    if components == 2 then
      local imaginary = arithmetic.text(arithmetic.final(values(total[at + 1])))
      one = one .. (string.match(imaginary, '^%-') and '' or '+') .. imaginary .. 'j'
    end
    into[#into + 1] = one
  end
  for at = 1, shown * components, components do
    write(sums, same, at)
    write(means, function(a) return arithmetic.divide(a, divisor) end, at)
  end
  say('sum %s', table.concat(sums, ' '))
  say('mean %s', table.concat(means, ' '))
  return lines
end

local ok, result = pcall(main)
if ok or (type(result) == 'table' and result.err) then
  return result
end
-- Servers before 7.0 raise an error of redis.call as text.
return redis.error_reply(tostring(result))
