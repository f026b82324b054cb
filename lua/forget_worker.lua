-- Forgets that a session has sent gradients for a worker, so that the worker is no longer known by it.
--
-- KEYS record       redisacc:{NAME}            the record of the accumulator
-- KEYS sessions     redisacc:{NAME}:sessions   session id -> its last request, the outcome, and totals
-- ARGV incarnation  text     the incarnation that the handle opened
-- ARGV session      text     id of the session
-- ARGV worker       text     name of the worker
--
-- Replies:
-- {'cleared'}               the totals of the session are 0; its last request stays, so a copy of it changes nothing
-- {'unknown'}               the session is gone, or has sent its last request for another worker; nothing changed
-- {'missing'}               there is no such accumulator
-- {'replaced'}              the accumulator was deleted and created again
-- {'corrupt', where, text}  a key or field holds what redisacc never writes; nothing changed

-- #include "read_record"
-- #include "even_when_full"
-- #bind

local record, refusal = read_record(keys.record, args.incarnation, {}, 0)
if not record then
  return refusal
end
local text = redis.call('HGET', keys.sessions, args.session)
if not text then
  return {'unknown'}
end
local request, worker = string.match(text, '^(%d+ %a+ %-?%d+ %d+ %d+) %d+ %d+ (.*)$')
if not request then
  return {'corrupt', 'sessions', string.sub(text, 1, 64)}
end
if worker ~= args.worker then
  return {'unknown'}
end
even_when_full(keys.record)
redis.call('HSET', keys.sessions, args.session, request .. ' 0 0 ' .. worker)
return {'cleared'}
