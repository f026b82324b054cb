-- Adds one gradient to the sums of the current round, row by row, in place.
--
-- KEYS[1] redisacc:{NAME}             the record
-- KEYS[2] redisacc:{NAME}:sums        index -> packed count and sum; total -> "gradients rows"
-- KEYS[3] redisacc:{NAME}:workers     worker -> gradients in this round
-- KEYS[4] redisacc:{NAME}:clients     client -> last request and totals
-- ARGV[1] incarnation                 the one that the handle opened
-- ARGV[2] client                      id of the sender
-- ARGV[3] sequence                    "number acknowledged": number of the request, growing for each client (the same
--                                     again changes nothing), and the last one of which the client knows the outcome
-- ARGV[4] worker                      name under which the gradient is counted
-- ARGV[5] local_step                  int64 as text
-- ARGV[6] round_shape                 shape that must be the same for all gradients of a round, "[16]"
-- ARGV[7] element                     "f" or "d": how an element is packed (struct)
-- ARGV[8] row_bytes                   bytes of a row; the last row may be shorter
-- ARGV[9] limit                       largest magnitude that stays exact in a sum, or "" for none
-- ARGV[10] indices                    ascending, decimal, parted by ", "
-- ARGV[11] rows                       the rows one after the other, little-endian
--
-- Replies:
-- {'applied', global_step, num_accumulated}    added and counted
-- {'stale', global_step, num_accumulated}      local_step < global_step: dropped
-- {'misshapen', round_shape}                   the round holds gradients of another shape; nothing changed
-- {'inexact'}                                  a sum would pass limit; nothing changed: park it instead
-- {'superseded', sequence}                     a later request of this client has been executed; nothing changed
-- {'forgotten', now_ms}                        this client is unknown, and too old to be new; nothing changed
-- {'lost', sequence}                           the client knows the outcome of a later request than this, the last one
--                                              that the server knows; nothing changed
-- {'missing'}                                  no such accumulator
-- {'replaced'}                                 it was deleted and created anew
-- {'corrupt', where, text}                     something under our keys isn't ours; nothing changed

-- #include "admit"
-- #include "sums_total"
-- #include "adder"

local keys = {record = KEYS[1], sums = KEYS[2], workers = KEYS[3], clients = KEYS[4]}
local request = {
  incarnation = ARGV[1], client = ARGV[2], sequence = ARGV[3], worker = ARGV[4],
  local_step = ARGV[5], round_shape = ARGV[6],
}
local element, row_bytes, limit, indices, rows = ARGV[7], tonumber(ARGV[8]), tonumber(ARGV[9]), ARGV[10], ARGV[11]

-- Each stored row begins with the number of gradients that held its index.
local COUNT, COUNT_BYTES = '<I8', 8
local ELEMENT_BYTES = {f = 4, d = 8}
-- unpack() and a command's arguments share Lua's stack, which ends at about 8,000 values.
local BATCH = 1000

local admission, refusal = admit(keys, request)
if not admission then
  return refusal
end

local add = adder(element, ELEMENT_BYTES[element], limit)
local total
total, refusal = read_total(keys.sums)
if not total then
  return refusal
end

-- All sums are formed before the first is stored: a row that turns out corrupt must leave nothing half added.
local writes = {}
local fields, position = {}, 1
local function add_batch()
  local stored = redis.call('HMGET', keys.sums, unpack(fields))
  local write = {}
  for i, field in ipairs(fields) do
    local bytes = math.min(row_bytes, #rows - position + 1)
    local count, row = 1
    if stored[i] then
      if #stored[i] ~= COUNT_BYTES + bytes then
        return {'corrupt', 'sums', field}
      end
      count = struct.unpack(COUNT, stored[i]) + 1
      row = add(stored[i], COUNT_BYTES + 1, rows, position, bytes)
      if not row then
        return {'inexact'}
      end
    else
      row = string.sub(rows, position, position + bytes - 1)
    end
    position = position + bytes
    total.rows = total.rows + 1
    write[2 * i - 1] = field
    write[2 * i] = struct.pack(COUNT, count) .. row
  end
  writes[#writes + 1] = write
  fields = {}
  return nil
end

for field in string.gmatch(indices, '%d+') do
  fields[#fields + 1] = field
  if #fields == BATCH then
    refusal = add_batch()
    if refusal then
      return refusal
    end
  end
end
if #fields > 0 then
  refusal = add_batch()
  if refusal then
    return refusal
  end
end

local last = writes[#writes] or {}
last[#last + 1] = 'total'
last[#last + 1] = total_text(total.gradients + 1, total.rows)
writes[math.max(#writes, 1)] = last
for _, write in ipairs(writes) do
  redis.call('HSET', keys.sums, unpack(write))
end
keep(admission.record.lease_ms, keys.sums)
return count_gradient(keys, request, admission)
