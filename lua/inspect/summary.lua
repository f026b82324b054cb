-- Prints the state of an accumulator: its schema, its round, the waiting takers, and the rounds that were taken and not
-- acknowledged.
--
-- KEYS record  redisacc:{NAME}   the record of the accumulator
--
-- Replies: lines of text, or an error.

-- A file of its own, without includes, for redis-cli:
--
--   redis-cli --raw --eval lua/inspect/summary.lua 'redisacc:{NAME}'
--
-- It only reads, and never more than some dozens of fields, however large the accumulator is. The other keys carry the
-- same hash tag, and their names are formed here, so that they need not be typed.

local record_key = KEYS[1] or ''

-- The number of workers, takers and rounds that are named; the rest are only counted.
local SHOWN = 10

-- Replaces control characters in ASCII and UTF-8: anyone may have written the names, and a terminal may show them.
local function safe(text)
  text = string.gsub(string.gsub(text, '%c', '?'), '\194[\128-\159]', '?')
  return text
end

local lines = {}
local function say(...)
  lines[#lines + 1] = safe(string.format(...))
end

local fields = redis.call('HMGET', record_key, 'kind', 'dtype', 'shape', 'reduction_type', 'global_step',
  'num_accumulated', 'round_shape', 'applied', 'stale', 'repeated', 'duplicates', 'takes', 'buffered_bytes',
  'buffer_limit', 'created_ms', 'incarnation', 'once_per_worker', 'sparse_mean')
for i = 1, 18 do
  if not fields[i] then
    return redis.error_reply(
      'ERR there is no accumulator ' .. safe(record_key) .. '; SMEMBERS redisacc:names lists them')
  end
end
local kind, dtype, shape, reduction, step, count, round_shape, applied, stale, repeated, duplicates, takes,
  buffered_bytes, buffer_limit, created_ms, incarnation, once_per_worker,
  sparse_mean = unpack(fields)

local time = redis.call('TIME')
local now_ms = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local function ago(ms)
  return string.format('%.1f s', (now_ms - (tonumber(ms) or now_ms)) / 1000)
end

say('%s: %s %s %s %s%s', record_key, kind, dtype, shape, reduction,
  sparse_mean == 'round' and ' by the gradients of the round' or '')
if string.match(incarnation, '^deleted:') then
  say('this accumulator is being deleted')
end
say('step %s, %s gradients in this round%s', step, count, round_shape ~= '' and ' of shape ' .. round_shape or '')
-- One field of the sums isn't a row but the total that they must add up to.
local sums = math.max(redis.call('HLEN', record_key .. ':sums') - 1, 0)
local buffered = redis.call('HLEN', record_key .. ':buffered')
say('held: %d rows in place, %d buffered with %s of %s bytes', sums, buffered, buffered_bytes, buffer_limit)
say('so far: %s applied, %s stale, %s repeated, %s sent twice, %s rounds taken; created %s ago', applied, stale,
  repeated, duplicates, takes, ago(created_ms))
if once_per_worker == '1' then
  say('a round accepts one gradient of each worker')
end

-- Returns the first fields of a hash, and its size. HSCAN returns a small hash whole, however few fields are requested.
local function some(key)
  local found = redis.call('HSCAN', key, '0', 'COUNT', SHOWN)[2]
  return found, redis.call('HLEN', key)
end
local function rest(shown, all)
  if all > shown then
    say('  and %d more', all - shown)
  end
end

local workers, number = some(record_key .. ':workers')
say('workers that contributed to this round: %d', number)
local shown = math.min(#workers / 2, SHOWN)
for i = 1, shown do
  say('  %s: %s', workers[2 * i - 1], workers[2 * i])
end
rest(shown, number)

local queue = redis.call('ZRANGE', record_key .. ':queue', 0, SHOWN - 1)
number = redis.call('ZCARD', record_key .. ':queue')
say('waiting takers: %d', number)
for _, token in ipairs(queue) do
  local entry = redis.call('HGET', record_key .. ':takers', token) or ''
  local required, lease_end, taker = string.match(entry, '^(%d+) (%d+) (.*)$')
  if required then
    say('  %s of %s: %s%s', count, required, taker, tonumber(lease_end) < now_ms and ' (gone)' or '')
  end
end
rest(#queue, number)

local taken
taken, number = some(record_key .. ':taken')
say('rounds taken and not acknowledged: %d', number)
shown = math.min(#taken / 2, SHOWN)
for i = 1, shown do
  local state, closed, held, granted_ms, taker = string.match(taken[2 * i],
    '^(%a+) (%-?%d+) (%d+) (%d+) %S+ (.*)$')
  if state then
    say('  step %s with %s gradients, %s %s ago to %s, token %s', closed, held, state, ago(granted_ms), taker,
      taken[2 * i - 1])
  end
end
rest(shown, number)

say('remembered sessions: %d', redis.call('HLEN', record_key .. ':sessions'))
return lines
