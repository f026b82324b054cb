-- Prints the state of an accumulator: its schema, its round, the waiting takers, the rounds that were taken and not
-- acknowledged, and those that were recovered.
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
-- A taker that waits for up to this number of gradients waits for any number.
local MOST = '999999999999999'

-- Replaces what must not reach a terminal: control characters, and marks that change the direction of text (U+200E,
-- U+200F, U+202A to U+202E, U+2066 to U+2069).
local function safe(text)
  text = string.gsub(string.gsub(text, '%c', '?'), '\194[\128-\159]', '?')
  text = string.gsub(string.gsub(text, '\226\128[\142\143\170-\174]', '?'), '\226\129[\166-\169]', '?')
  return text
end

local lines = {}
local function say(...)
  lines[#lines + 1] = safe(string.format(...))
end

local fields = redis.call('HMGET', record_key, 'kind', 'dtype', 'shape', 'reduction_type', 'global_step',
  'num_accumulated', 'round_shape', 'applied', 'stale', 'repeated', 'duplicates', 'takes', 'buffered_bytes',
  'buffer_limit', 'created_ms', 'incarnation', 'once_per_worker', 'sparse_mean', 'missing',
  'max_staleness', 'staleness', 'quorum', 'quorum_most', 'quorum_grace_ms', 'partitions', 'staleness_weight',
  'normalize', 'total_weight', 'order')
for i = 1, 19 do
  if not fields[i] then
    return redis.error_reply(
      'ERR there is no accumulator ' .. safe(record_key) .. '; SMEMBERS redisacc:names lists them')
  end
end
local kind, dtype, shape, reduction, step, count, round_shape, applied, stale, repeated, duplicates, takes,
  buffered_bytes, buffer_limit, created_ms, incarnation, once_per_worker, sparse_mean, missing = unpack(fields, 1, 19)
local max_staleness, staleness, partitions = fields[20], fields[21], fields[25]
local staleness_weight, normalize, total_weight, order = unpack(fields, 26, 29)

local time = redis.call('TIME')
local now_ms = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local function ago(ms)
  return string.format('%.1f s', (now_ms - (tonumber(ms) or now_ms)) / 1000)
end

local divisor = sparse_mean == 'round' and ' by the gradients of the round' or ''
if kind == 'tree' then
  divisor = (missing == 'skip' and ' by the gradients that have the leaf' or ' by the gradients of the round')
    .. (sparse_mean == 'index' and ', of a row by those that held its index' or '')
end
if normalize == 'count' then
  divisor = string.gsub(divisor == '' and ' by the gradients' or divisor, '^ by', ' by the number of')
end
say('%s: %s %s %s %s%s', record_key, kind, dtype, shape, reduction, divisor)
if kind == 'tree' then
  say('`redisacc show NAME --json` lists the leaves')
end
if string.match(incarnation, '^deleted:') then
  say('this accumulator is being deleted')
end
local has_shape = round_shape ~= '' and kind ~= 'tree'
-- The field is absent while all weights are 1.
local weight = total_weight and ' with a weight of ' .. total_weight or ''
say('step %s, %s gradients in this round%s%s', step, count, weight, has_shape and ' of shape ' .. round_shape or '')
-- One field of the sums isn't a row but the total that they must add up to.
local sums = math.max(redis.call('HLEN', record_key .. ':sums') - 1, 0)
local buffered = redis.call('HLEN', record_key .. ':buffered')
say('held: %d rows in place, %d buffered with %s of %s bytes', sums, buffered, buffered_bytes, buffer_limit)
say('so far: %s applied, %s stale, %s repeated, %s sent twice, %s rounds taken; created %s ago', applied, stale,
  repeated, duplicates, takes, ago(created_ms))
-- A record has this only if the parts of its gradients lie in other slots.
if partitions then
  say('parts of gradients lie in the partitions %s; %d attempts are under way or to be removed', partitions,
    redis.call('ZCARD', record_key .. ':attempts'))
end
if once_per_worker == '1' then
  local added = order == 'worker' and ', and adds them in the order of the workers\' numbers' or ''
  say('a round accepts one gradient of each worker%s', added)
end
-- A record has these two only if gradients may be late.
if max_staleness then
  say('gradients may be up to %s steps late; steps:gradients in this round: %s', max_staleness, staleness or 'none')
end
if staleness_weight then
  say('weights by staleness: %s', string.sub(staleness_weight, 1, 80))
end

if fields[22] then
  local least, most, wait_ms = unpack(fields, 22, 24)
  local grace = ''
  if wait_ms then
    grace = string.format(', or up to %s within %.1f s', most or 'more', (tonumber(wait_ms) or 0) / 1000)
  end
  say('quorum: a take that does not say it requires %s%s', least, grace)
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
  -- Traceparents may follow the number.
  say('  %s: %s', workers[2 * i - 1], string.match(workers[2 * i], '^%d+') or workers[2 * i])
end
rest(shown, number)

local queue = redis.call('ZRANGE', record_key .. ':queue', 0, SHOWN - 1)
number = redis.call('ZCARD', record_key .. ':queue')
say('waiting takers: %d', number)
for _, token in ipairs(queue) do
  local entry = redis.call('HGET', record_key .. ':takers', token) or ''
  local required, more, lease_end, taker = string.match(entry, '^(%d+)(%S*) (%d+) (.*)$')
  if required then
    -- A taker may also say what weight it waits for; and with a grace, up to how many gradients, and how long.
    local min_weight, grace = string.match(more, '^%*([%d.e+-]-)(%.%..*)$')
    min_weight = min_weight or string.match(more, '^%*([%d.e+-]+)$')
    if min_weight then
      required, more = required .. ' with a weight of ' .. min_weight, grace or ''
    end
    local limit, wait_ms = string.match(more, '^%.%.(%d+)%+(%d+)$')
    if limit then
      limit = limit == MOST and 'more' or limit
      required = string.format('%s, or up to %s within %.1f s', required, limit, tonumber(wait_ms) / 1000)
    end
    say('  %s of %s: %s%s', count, required, taker, tonumber(lease_end) < now_ms and ' (gone)' or '')
  end
end
rest(#queue, number)

local taken
taken, number = some(record_key .. ':taken')
say('rounds taken and not acknowledged: %d', number)
shown = math.min(#taken / 2, SHOWN)
for i = 1, shown do
  local entry = string.gsub(taken[2 * i], '^(%a+ %-?%d+ %d+ %d+) staleness=%S+', '%1')
  local taken_weight = string.match(entry, '^%a+ %-?%d+ %d+ %d+ weight=(%S+)')
  entry = string.gsub(entry, '^(%a+ %-?%d+ %d+ %d+) weight=%S+', '%1')
  local state, closed, held, granted_ms, taker = string.match(entry, '^(%a+) (%-?%d+) (%d+) (%d+) %S+ (.*)$')
  if state then
    say('  step %s with %s gradients%s, %s %s ago to %s, token %s', closed, held,
      taken_weight and ' of weight ' .. taken_weight or '', state, ago(granted_ms), taker, taken[2 * i - 1])
  end
end
rest(shown, number)

-- Each recovery: the old token, the new one, when it was, and the new taker. The latest comes first.
local recovered = redis.call('LRANGE', record_key .. ':recovered', 0, SHOWN - 1)
number = redis.call('LLEN', record_key .. ':recovered')
say('recovered rounds: %d', number)
for _, entry in ipairs(recovered) do
  local old, token, recovered_ms, taker = string.match(entry, '^(%S+) (%S+) (%d+) (.*)$')
  if old then
    say('  %s ago by %s, token %s, before %s', ago(recovered_ms), taker, token, old)
  end
end
rest(#recovered, number)

say('remembered sessions: %d', redis.call('HLEN', record_key .. ':sessions'))
return lines
