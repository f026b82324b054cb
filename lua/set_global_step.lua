-- Sets the global step and keeps the accumulated gradients.
--
-- KEYS record           redisacc:{NAME}            the record of the accumulator
-- KEYS sessions         redisacc:{NAME}:sessions   session id -> its last request, the outcome, and totals
-- ARGV incarnation      text     the incarnation that the handle opened
-- ARGV session          text     id of the sender
-- ARGV sequence         number   number of the request; a session's numbers grow, and a repeated one changes nothing
-- ARGV acknowledged     number   the last request whose outcome the session knows; 0 if there is none
-- ARGV worker           text     name of the sender
-- ARGV new_global_step  int64    the step to set
--
-- Replies:
-- {'set', global_step, num_accumulated}       the step was set
-- {'lowered', global_step, num_accumulated}   the step was set, and was higher before
-- {'fenced', global_step, num_accumulated}    resolve had already ruled this request out; only duplicates grew
-- {'superseded', sequence}                    a later request of this session has been executed; nothing changed
-- {'forgotten', now_ms}                       the session is unknown and too old to be new; nothing changed
-- {'lost', sequence}                          the session knows the outcome of a later request than this one, which is
--                                             the last that the server knows; nothing changed
-- {'missing'}                                 there is no such accumulator
-- {'replaced'}                                the accumulator was deleted and created again
-- {'corrupt', where, text}                    a key or field holds what redisacc never writes; nothing changed

-- #include "begin_change"
-- #include "extend_leases"
-- #include "announce"
-- #include "even_when_full"
-- #bind

local record, entry, refusal = begin_change(keys, args)
if not record then
  return refusal
end

local reply = {
  integer_text_less(args.new_global_step, record.global_step) and 'lowered' or 'set',
  args.new_global_step, count_text(record.num_accumulated),
}
even_when_full(keys.record)
redis.call('HSET', keys.record, 'global_step', args.new_global_step)
write_session(keys.sessions, args.session, entry, reply, args.worker)
extend_leases(record.lease_ms, keys.sessions)
announce(keys.record, string.format('%s step=%s count=%s', reply[1], reply[2], reply[3]))
return reply
