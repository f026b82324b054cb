-- #include "count_text"

-- The field WORKER of the workers hash has the text "number": how many gradients of this worker are in the current
-- round. The traceparents of those that were traced follow, each after a space. Takers link their spans.

-- At most this many bytes of traceparents, sixteen of them, are kept for a worker. Later ones are dropped.
local TRACES_BYTES = 16 * 56

-- Returns a worker's number and its traceparents as text, or nil if the field holds what redisacc never writes.
local function read_contribution(workers_key, worker)
  local text = redis.call('HGET', workers_key, worker) or '0'
  local number = parse_count(text)
  if number then
    return number, ''
  end
  local digits, traces = string.match(text, '^(%d+)( .*)$')
  return parse_count(digits), traces and #traces <= TRACES_BYTES and traces or ''
end

local function write_contribution(workers_key, worker, number, traces, trace)
  if trace ~= '' and #traces + 1 + #trace <= TRACES_BYTES then
    traces = traces .. ' ' .. trace
  end
  redis.call('HSET', workers_key, worker, count_text(number) .. traces)
end
