-- Prints the exact sum and the count of one index of the current round: of a row, or of elements of an array.
--
-- KEYS record  redisacc:{NAME}   the record of the accumulator
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
--
-- It only reads, and loads nothing but the row. A sum in place is one HGET. In a buffered gradient it finds the index
-- by a search over the sorted indices, with GETRANGE if the gradient is large. Searching many gradients would hold the
-- server for too long, so it refuses if more than 200 are buffered.
--
-- Trees, weights, encoded gradients, parts in other slots, and integers and complex numbers are left to
-- `redisacc show`, which has no such bounds. An error says so.
--
-- The other keys carry the same hash tag, and their names are formed here, because only the headers of the gradients
-- say which keys there are.

local record_key, index, most = KEYS[1] or '', ARGV[1] or '', tonumber(ARGV[2] or '16')

local MOST_ELEMENTS, MOST_BUFFERED = 1000, 200
local TWO_32 = 4294967296

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

local function leave_to_show(...)
  fail('%s: use `redisacc show NAME --index I`', string.format(...))
end

-- The elements of each dtype, as they are stored: the bytes of one, and the function that reads it.

local function by_struct(bytes, letter)
  return {bytes = bytes, read = function(data, at) return (struct.unpack(letter, data, at)) end}
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

local stored = {
  float32 = by_struct(4, '<f'), float64 = by_struct(8, '<d'), float16 = {bytes = 2, read = float16},
  bfloat16 = {bytes = 2, read = bfloat16},
}

-- How elements are added: the type to which each sum is rounded, how it is stored in place, and its text.

local function float32(x)
  return (struct.unpack('<f', struct.pack('<f', x)))
end

local function float64(x)
  return x
end

-- Returns what writes a number with the fewest digits that distinguish it from its neighbors.
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

local single = {round = float32, in_place = stored.float32, text = real_text(float32, 6, 9)}
local double = {round = float64, in_place = stored.float64, text = real_text(float64, 15, 17)}
local sums_of = {float32 = single, float64 = double, float16 = single, bfloat16 = single}

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

-- Parses a header: finds where indices, counts and values lie in the bytes of the gradient. Checks that the header fits
-- the array and its parts, because anyone may have written it.
local function parse(id, entry, array)
  local function check(is_ours)
    if not is_ours then
      fail('gradient %s has a header that redisacc did not write', id)
    end
  end
  local order, packed = string.match(entry, '^(%d+) (.*)$')
  local ok, header = pcall(cmsgpack.unpack, packed or '')
  check(ok and type(header) == 'table' and header.version == 2 and type(header.sections) == 'table')
  check(#header.sections == 1 and type(header.sections[1]) == 'table')
  check(type(header.gradients) == 'number' and header.gradients >= 1)
  local name, shape = header.sections[1][1], sizes(header.sections[1][2])
  if array.dtype == 'float32' and (name == 'bfloat16' or name == 'int8') then
    leave_to_show('gradient %s is encoded as %s', id, name)
  end
  local how, before = stored[name], array.sparse and 1 or 0
  check(how and shape and #shape == #array.dims + before)
  for axis, dim in ipairs(array.dims) do
    check(shape[axis + before] == dim)
  end
  local rows = array.sparse and shape[1] or 1
  local summed = array.sparse and header.gradients > 1
  local counts = array.sparse and rows * 8 or 0
  local values = summed and 2 * counts or counts
  local bytes = values + rows * array.elements * how.bytes
  local parts, total = sizes(header.parts)
  check(parts and (#parts == 0 or total == bytes))
  for _, length in ipairs(parts) do
    check(length > 0)
  end
  if #parts > 0 and redis.call('HGET', record_key, 'partitions') then
    leave_to_show('gradient %s has its parts in partitions, which no script can read', id)
  end
  return {id = id, order = tonumber(order), number = header.gradients, how = how, rows = rows, summed = summed,
    counts = counts, values = values, bytes = bytes, parts = parts}
end

-- Returns all buffered gradients, in the order of their places.
local function buffered_gradients(array)
  local number = redis.call('HLEN', record_key .. ':buffered')
  if number > MOST_BUFFERED then
    leave_to_show('%d gradients are buffered, and this script searches at most %d', number, MOST_BUFFERED)
  end
  local entries, gradients = redis.call('HGETALL', record_key .. ':buffered'), {}
  for i = 1, #entries, 2 do
    gradients[#gradients + 1] = parse(entries[i], entries[i + 1], array)
  end
  table.sort(gradients, function(a, b) return a.order < b.order end)
  return gradients
end

-- Returns bytes of a gradient. A field of a hash can't be read in pieces, so an inline one is kept; parts are not.
local function bytes_of(gradient, from, length)
  if #gradient.parts == 0 then
    gradient.data = gradient.data or redis.call('HGET', record_key .. ':inline', gradient.id) or ''
    if #gradient.data ~= gradient.bytes then
      fail('%s:inline %s is gone, or has another length: it was evicted or removed by hand', record_key, gradient.id)
    end
    return string.sub(gradient.data, from + 1, from + length)
  end
  local pieces, start = {}, 0
  for part, size in ipairs(gradient.parts) do
    local low, high = math.max(from, start), math.min(from + length, start + size)
    if low < high then
      local key = string.format('%s:part:%s:%d', record_key, gradient.id, part - 1)
      local piece = redis.call('GETRANGE', key, string.format('%.0f', low - start),
        string.format('%.0f', high - 1 - start))
      if #piece ~= high - low then
        fail('%s is gone, or too short: it was evicted or removed by hand', key)
      end
      pieces[#pieces + 1] = piece
    end
    start = start + size
  end
  return table.concat(pieces)
end

-- Returns the place of an index, given as halves, in a gradient: from 0, or nil if the gradient does not hold it.
local function find(gradient, wanted_high, wanted_low)
  local first, last = 0, gradient.rows - 1
  while first <= last do
    local guess = math.floor((first + last) / 2)
    local low, high = struct.unpack('<I4I4', bytes_of(gradient, guess * 8, 8))
    if high == wanted_high and low == wanted_low then
      return guess
    elseif high < wanted_high or (high == wanted_high and low < wanted_low) then
      first = guess + 1
    else
      last = guess - 1
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
  return high, low
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

-- Adds up elements as a take does: the buffered gradients first, in the order of their places, then the sums in place.
--
-- `row` is the index of a row as text, or nil for a dense array. `first` is the place of the first element in the row
-- or array. Returns the sum of each, and how many gradients are in it: those added in place, those buffered.
local function add_up(array, row, first, shown)
  local sums, total, in_place, buffered = sums_of[array.dtype], {}, 0, 0
  local function add(data, how, from)
    for i = 1, #data / how.bytes do
      local value = how.read(data, (i - 1) * how.bytes + 1)
      total[from + i] = total[from + i] and sums.round(total[from + i] + value) or value
    end
  end

  local high, low = parse_index(row or '')
  for _, gradient in ipairs(buffered_gradients(array)) do
    local place = row and find(gradient, high, low) or (not row and 0)
    if place then
      local held = gradient.number
      if gradient.summed then
        held = struct.unpack('<I8', bytes_of(gradient, gradient.counts + place * 8, 8))
      end
      buffered = buffered + held
      local element = gradient.how.bytes
      local from = gradient.values + (place * array.elements + first) * element
      add(bytes_of(gradient, from, shown * element), gradient.how, 0)
    end
  end

  local element = sums.in_place.bytes
  local chunk = row and math.max(array.elements, 1) or array.chunk
  for base = math.floor(first / chunk) * chunk, math.max(first + shown - 1, first), chunk do
    local field = row and string.gsub(row, '^0+(%d)', '%1') or string.format('%.0f', base / chunk)
    local packed = redis.call('HGET', record_key .. ':sums', field)
    if packed then
      -- A row begins with the number of gradients that held it, in 7 bytes, and a byte that is 0 without weights.
      if #packed ~= 8 + math.min(chunk, array.elements - base) * element or string.byte(packed, 8) ~= 0 then
        fail('row %s of the sums has %d bytes, so redisacc did not write it', field, #packed)
      end
      in_place = struct.unpack('<I7', packed)
      local from, stop = math.max(first, base), math.min(first + shown, base + chunk)
      add(string.sub(packed, 9 + (from - base) * element, 8 + (stop - base) * element), sums.in_place,
        from - first)
    end
  end
  return total, in_place, buffered
end

local function main()
  if not (rawget(_G, 'struct') and rawget(_G, 'cmsgpack')) then
    leave_to_show("this server's Lua has no struct or no cmsgpack")
  end
  local kind, dtype, round_shape, step, accumulated, chunk, total_weight = unpack(redis.call('HMGET', record_key,
    'kind', 'dtype', 'round_shape', 'global_step', 'num_accumulated', 'chunk', 'total_weight'))
  chunk = tonumber(chunk)
  if not (kind and dtype and round_shape and step and accumulated and chunk) then
    fail('there is no accumulator %s; SMEMBERS redisacc:names lists them', record_key)
  end
  if kind == 'tree' then
    fail('this script reads no trees: use `redisacc show NAME --leaf PATH --index I`')
  end
  if index ~= '' and (string.match(index, '[^%d,]') or string.match(',' .. index .. ',', ',,')
      or string.match(index, string.rep('%d', 20))) then
    fail('the index must be whole numbers separated by commas, not %s', index)
  end
  if not most or most ~= math.floor(most) or most < 1 or most > MOST_ELEMENTS then
    fail('the number of elements to print must be a whole number, 1 to %d', MOST_ELEMENTS)
  end
  if kind == 'sparse' and index == '' then
    fail('a sparse accumulator needs an index')
  end
  local lines = {}
  local function say(...)
    lines[#lines + 1] = safe(string.format(...))
  end
  say('accumulator %s %s %s', record_key, kind, dtype)
  say('index %s', index == '' and 'all' or index)
  say('step %s', step)
  say('gradients %s', accumulated)
  if accumulated == '0' then
    say('count 0')
    return lines
  end
  if not sums_of[dtype] then
    leave_to_show('this script reads no elements of the dtype %s', dtype)
  elseif total_weight then
    leave_to_show('gradients of this round have weights')
  end

  local array = {sparse = kind == 'sparse', dtype = dtype, dims = {}, elements = 1, chunk = chunk}
  for dim in string.gmatch(round_shape, '%d+') do
    array.dims[#array.dims + 1] = tonumber(dim)
    array.elements = array.elements * tonumber(dim)
  end
  local row = array.sparse and string.match(index, '^%d+') or nil
  local coordinates = {}
  for coordinate in string.gmatch(row and string.sub(index, #row + 1) or index, '%d+') do
    coordinates[#coordinates + 1] = tonumber(coordinate)
  end
  local first, number = span(coordinates, array.dims)
  local shown = math.min(number, most)
  local total, in_place, buffered = add_up(array, row, first, shown)
  if in_place > tonumber(accumulated) then
    fail('a row of the sums has %.0f gradients, but the round has %s', in_place, accumulated)
  end
  if not array.sparse and number > 0 and in_place + buffered ~= tonumber(accumulated) then
    fail('only %.0f of %s gradients were found: keys were evicted or removed by hand', in_place + buffered, accumulated)
  end
  say('count %.0f', array.sparse and in_place + buffered or tonumber(accumulated))
  say('held in place %.0f, buffered %.0f', in_place, buffered)
  if in_place + buffered == 0 then
    return lines
  end
  say('elements %d of %.0f', shown, number)
  for at = 1, shown do
    total[at] = sums_of[dtype].text(total[at])
  end
  say('sum %s', table.concat(total, ' '))
  return lines
end

local ok, result = pcall(main)
if ok or (type(result) == 'table' and result.err) then
  return result
end
-- Servers before 7.0 raise an error of redis.call as text.
return redis.error_reply(tostring(result))
