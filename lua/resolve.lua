-- Tells the outcome of a request whose reply was lost, and fences the request if it was not executed.
--
-- KEYS record       redisacc:{NAME}            the record of the accumulator
-- KEYS sessions     redisacc:{NAME}:sessions   session id -> its last request, the outcome, and totals
-- ARGV incarnation  text     the incarnation that the handle opened
-- ARGV session      text     id of the sender
-- ARGV sequence     number   number of the request in question
-- ARGV acknowledged number   the last request whose outcome the session knows; 0 if there is none
-- ARGV worker       text     name of the sender
--
-- Replies:
-- {'applied', global_step, num_accumulated}   the request applied a gradient: the reply of apply or buffer
-- {'stale', global_step, num_accumulated}     the request brought a stale gradient: the reply of apply or buffer
-- {'repeated', global_step, num_accumulated}  the request brought a worker's second gradient: the same
-- {'set', global_step, num_accumulated}       the request set the step: the reply of set_global_step
-- {'lowered', global_step, num_accumulated}   the request lowered the step: the reply of set_global_step
-- {'quorum', global_step, num_accumulated}    the request changed the quorum: the reply of set_quorum
-- {'taken', global_step, num_accumulated}     the request was a take, and was granted this round
-- {'fenced', global_step, num_accumulated}    the request was not executed, and no copy of it ever will be
-- {'superseded', sequence}                    a later request of this session has been executed; nothing changed
-- {'forgotten', now_ms}                       the session is unknown and too old to be new; nothing changed
-- {'lost', sequence}                          the session knows the outcome of a later request than this one, which is
--                                             the last that the server knows; nothing changed
-- {'missing'}                                 there is no such accumulator
-- {'replaced'}                                the accumulator was deleted and created again
-- {'corrupt', where, text}                    a key or field holds what redisacc never writes; nothing changed

-- #include "read_record"
-- #include "begin_request"
-- #include "extend_leases"
-- #include "even_when_full"
-- #bind

local record, refusal = read_record(keys.record, args.incarnation, {'num_accumulated', 'lease_ms'}, 0)
if not record then
  return refusal
end
local entry
entry, refusal = begin_request(keys.sessions, args)
if not entry then
  return refusal
end
even_when_full(keys.record)
local reply = {'fenced', record.global_step, count_text(record.num_accumulated)}
write_session(keys.sessions, args.session, entry, reply, args.worker)
extend_leases(record.lease_ms, keys.sessions)
return reply
