-- #include "count_text"

-- The field WORKER of the workers hash has the text "number": how many gradients of this worker are in the current
-- round. Notes follow, each after a space: the traceparents of those that were traced, because takers link their spans;
-- "name=value*weight" for each metric of a gradient; "~digest" of the gradient; and "=JSON" for what the program keeps.

-- The notes of a worker have at most this many bytes, and those of a gradient at most 1868. Others are dropped.
local NOTES_BYTES = 2048

-- Returns a worker's number and its notes as text, or nil if the field holds what redisacc never writes.
local function read_contribution(workers_key, worker)
  local text = redis.call('HGET', workers_key, worker) or '0'
  local number = parse_count(text)
  if number then
    return number, ''
  end
  local digits, notes = string.match(text, '^(%d+)( .*)$')
  return parse_count(digits), notes and #notes <= NOTES_BYTES and notes or ''
end

local function write_contribution(workers_key, worker, number, notes, added)
  if added ~= '' and #notes + 1 + #added <= NOTES_BYTES then
    notes = notes .. ' ' .. added
  end
  redis.call('HSET', workers_key, worker, count_text(number) .. notes)
end
