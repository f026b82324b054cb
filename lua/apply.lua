-- Adds one gradient to the sums of the current round, row by row, in place.
--
-- KEYS record       redisacc:{NAME}            the record of the accumulator
-- KEYS sums         redisacc:{NAME}:sums       row -> its packed head and sum; and their total
-- KEYS workers      redisacc:{NAME}:workers    worker -> its number of gradients in this round, and traceparents
-- KEYS sessions     redisacc:{NAME}:sessions   session id -> its last request, the outcome, and totals
-- ARGV incarnation  text      the incarnation that the handle opened
-- ARGV session      text      id of the sender
-- ARGV sequence     number    number of the request; a session's numbers grow, and a repeated one changes nothing
-- ARGV acknowledged number    the last request whose outcome the session knows; 0 if there is none
-- ARGV worker       text      name under which the gradient is counted
-- ARGV local_step   int64     the step for which the gradient was computed
-- ARGV own_step     flag      whether it is dropped if it is of a later step than the round
-- ARGV notes        text      what is noted of it for takers: see contribution.lua; "" if nothing is
-- ARGV round_shape  text      the shape that all gradients of a round must share, such as "[16]"
-- ARGV weight       number    factor applied to the gradient, before its staleness counts
-- ARGV sections... bytes     six values for each section: what its fields begin with, "" if it is the only one; how
--                            struct packs its elements, "f" or "d"; the largest magnitude that its sums hold exactly,
--                            "" if there is no limit; the bytes of its rows, of which the last may have fewer; its row
--                            indices in ascending order, in decimal, separated by ", "; and its rows one after the
--                            other, little-endian
--
-- Replies:
-- {'applied', global_step, num_accumulated}   the gradient was added and counted
-- {'stale', global_step, num_accumulated}     local_step < global_step - max_staleness, or local_step > global_step
--                                             and own_step: the gradient was dropped
-- {'repeated', global_step, num_accumulated}  the round has a gradient of this worker: this one was dropped
-- {'fenced', global_step, num_accumulated}    resolve had already ruled this request out; only duplicates grew
-- {'shape_mismatch', bound}                   the round holds gradients of another shape; nothing changed
-- {'unweighable', weight, total_weight}       this weight, or the total with it, is out of bounds; nothing changed
-- {'inexact'}                                 a sum would exceed the limit; nothing changed: buffer the gradient
-- {'superseded', sequence}                    a later request of this session has been executed; nothing changed
-- {'forgotten', now_ms}                       the session is unknown and too old to be new; nothing changed
-- {'lost', sequence}                          the session knows the outcome of a later request than this one, which is
--                                             the last that the server knows; nothing changed
-- {'missing'}                                 there is no such accumulator
-- {'replaced'}                                the accumulator was deleted and created again
-- {'corrupt', where, text}                    a key or field holds what redisacc never writes; nothing changed

-- #include "admit"
-- #include "sums_total"
-- #include "adder"
-- #bind

-- Each stored row begins with the number of gradients that held its index, in 7 bytes, and with its form: 0, or 1 if
-- the sum of their weights follows, because a weight of the round differs from 1. A row is damaged if its length does
-- not match its form. With the form 0, the first 8 bytes are the number, which reads faster.
local COUNT, COUNT_BYTES = '<I8', 8
local WEIGHTED, WEIGHTED_BYTES = '<I7I1d', 16
local ELEMENT_BYTES = {f = 4, d = 8}
-- unpack() and the arguments of a command share Lua's stack, which ends at about 8,000 values.
local BATCH = 1000
-- Looked up once, and not for every row.
local pack, take, sub = struct.pack, struct.unpack, string.sub

local admission, refusal = admit(keys, args)
if not admission then
  return refusal
end

local total
total, refusal = read_total(keys.sums)
if not total then
  return refusal
end
local weight, is_weighted = admission.weight, admission.total_weight > 0
total.gradients = total.gradients + 1
if is_weighted then
  total.weight = (total.weight or total.gradients - 1) + weight
elseif total.weight then
  return {'corrupt', 'sums', total_text(total)}
end

-- Returns the head of a row with this gradient in it, and the length of the head that it has now. stored: the row, or
-- false if it is new. Returns nil if redisacc did not write the row: none was in more gradients than `total` has.
local head
if is_weighted then
  -- #include "is_weight"
  head = function(stored, bytes)
    if not stored then
      return pack(WEIGHTED, 1, 1, weight)
    elseif #stored == COUNT_BYTES + bytes then
      local count = take(COUNT, stored)
      if count < total.gradients then
        return pack(WEIGHTED, count + 1, 1, count + weight), COUNT_BYTES
      end
    elseif #stored == WEIGHTED_BYTES + bytes then
      local count, form, row_weight = take(WEIGHTED, stored)
      if form == 1 and count < total.gradients and is_weight(row_weight) then
        return pack(WEIGHTED, count + 1, 1, row_weight + weight), WEIGHTED_BYTES
      end
    end
    return nil
  end
else
  local gradients = total.gradients
  head = function(stored, bytes)
    if not stored then
      return pack(COUNT, 1)
    elseif #stored == COUNT_BYTES + bytes then
      local count = take(COUNT, stored)
      if count < gradients then
        return pack(COUNT, count + 1), COUNT_BYTES
      end
    end
    return nil
  end
end

-- All sums are computed before the first is stored, because a corrupt row must not leave the gradient half added.
local writes, size = {}, 0
local function add_section(label, element, limit, row_bytes, indices, rows)
  local add = adder(element, ELEMENT_BYTES[element], limit)
  -- In a tree, this section counts which leaves the gradients have.
  if weight ~= 1 and not (label == 'present' and redis.call('HGET', keys.record, 'normalize') == 'count') then
    -- #include "scaled"
    rows = scaled(rows, weight, element, ELEMENT_BYTES[element])
  end
  local fields, num_fields, position = {}, 0, 1
  size = size + #rows
  local function add_batch()
    local stored = redis.call('HMGET', keys.sums, unpack(fields))
    local write = {}
    for i = 1, num_fields do
      local field, row, bytes = fields[i], stored[i], row_bytes
      if position + bytes > #rows then
        bytes = #rows - position + 1
      end
      local new_head, head_bytes = head(row, bytes)
      if not new_head then
        return {'corrupt', 'sums', sub(field, 1, 64)}
      end
      if row then
        row = add(row, head_bytes + 1, rows, position, bytes)
        if not row then
          return {'inexact'}
        end
      else
        row = sub(rows, position, position + bytes - 1)
      end
      position = position + bytes
      write[2 * i - 1] = field
      write[2 * i] = new_head .. row
    end
    total.rows = total.rows + num_fields
    writes[#writes + 1] = write
    fields, num_fields = {}, 0
    return nil
  end

  for index in string.gmatch(indices, '%d+') do
    num_fields = num_fields + 1
    fields[num_fields] = label == '' and index or label .. ':' .. index
    if num_fields == BATCH then
      local wrong = add_batch()
      if wrong then
        return wrong
      end
    end
  end
  return num_fields > 0 and add_batch() or nil
end

for n = 1, #args.sections, 6 do
  local label, element, limit, row_bytes, indices, rows = unpack(args.sections, n, n + 5)
  refusal = add_section(label, element, tonumber(limit), tonumber(row_bytes), indices, rows)
  if refusal then
    return refusal
  end
end

local last_write = writes[#writes] or {}
last_write[#last_write + 1] = 'total'
last_write[#last_write + 1] = total_text(total)
writes[math.max(#writes, 1)] = last_write
for _, write in ipairs(writes) do
  redis.call('HSET', keys.sums, unpack(write))
end
extend_leases(admission.record.lease_ms, keys.sums)
return count_gradient(keys, args, admission, size)
