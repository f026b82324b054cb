-- Changes the quorum of an accumulator: what a take waits for that passes no num_required.
--
-- KEYS record           redisacc:{NAME}            the record of the accumulator
-- KEYS sessions         redisacc:{NAME}:sessions   session id -> its last request, the outcome, and totals
-- KEYS queue            redisacc:{NAME}:queue      sorted set of tokens by ticket number
-- ARGV incarnation      text     the incarnation that the handle opened
-- ARGV session          text     id of the sender
-- ARGV sequence         number   number of the request; a session's numbers grow, and a repeated one changes nothing
-- ARGV acknowledged     number   the last request whose outcome the session knows; 0 if there is none
-- ARGV worker           text     name of the sender
-- ARGV quorum           text     the gradients that a take requires, at least 1; "" keeps the number, "none" removes it
-- ARGV quorum_most      text     the gradients that end its grace, at least quorum; "" and "none" likewise
-- ARGV quorum_grace_ms  text     how long its grace lasts; "" and "none" likewise
--
-- Replies:
-- {'quorum', global_step, num_accumulated}      the quorum was changed, and waiting takers have been told
-- {'conflict', quorum, quorum_most, quorum_grace_ms}
--                                               the quorum would be this: a field that another needs is "none", or
--                                               quorum_most is below quorum; nothing changed
-- {'fenced', global_step, num_accumulated}      resolve had already ruled this request out; only duplicates grew
-- {'superseded', sequence}                      a later request of this session has been executed; nothing changed
-- {'forgotten', now_ms}                         the session is unknown and too old to be new; nothing changed
-- {'lost', sequence}                            the session knows the outcome of a later request than this one, which
--                                               is the last that the server knows; nothing changed
-- {'missing'}                                   there is no such accumulator
-- {'replaced'}                                  the accumulator was deleted and created again
-- {'corrupt', where, text}                      a key or field holds what redisacc never writes; nothing changed

-- #include "begin_change"
-- #include "extend_leases"
-- #include "announce"
-- #include "even_when_full"
-- #bind

local NAMES = {'quorum', 'quorum_most', 'quorum_grace_ms'}

local record, entry, refusal = begin_change(keys, args)
if not record then
  return refusal
end

-- What is stored after the change. Two clients that each change one field must not end up with a combination that
-- neither of them could have chosen, so it is checked here, together with what is stored.
local given = {args.quorum, args.quorum_most, args.quorum_grace_ms}
local stored = redis.call('HMGET', keys.record, unpack(NAMES))
local texts, numbers, told = {}, {}, {}
for i, name in ipairs(NAMES) do
  texts[i] = given[i] ~= '' and given[i] or stored[i] or 'none'
  numbers[i] = parse_count(texts[i])
  if not numbers[i] and texts[i] ~= 'none' then
    return {'corrupt', name, string.sub(texts[i], 1, 64)}
  end
  told[i] = numbers[i] and string.format(' %s=%.0f', name, numbers[i]) or ''
end
local least, most, grace_ms = unpack(numbers, 1, 3)
if (most or grace_ms) and not least or most and (not grace_ms or most < least) then
  return {'conflict', unpack(texts)}
end

local reply = {'quorum', record.global_step, count_text(record.num_accumulated)}
-- A lower number lets takers drain a full server.
even_when_full(keys.record)
for i, name in ipairs(NAMES) do
  if numbers[i] then
    redis.call('HSET', keys.record, name, count_text(numbers[i]))
  else
    redis.call('HDEL', keys.record, name)
  end
end
write_session(keys.sessions, args.session, entry, reply, args.worker)
extend_leases(record.lease_ms, keys.sessions)
local message = string.format('quorum step=%s count=%s%s worker=%s', reply[2], reply[3], table.concat(told),
  args.worker)
announce(keys.record, message, redis.call('EXISTS', keys.queue) == 1 and message)
return reply
