-- Notes that a worker has the parameters of a training that the server has lost, or which worker is asked for them.
--
-- KEYS record       redisacc:{NAME}:parameters           the record of the parameters
-- KEYS claims       redisacc:{NAME}:parameters:claims    "worker NUMBER" -> "STEP INCARNATION MS PROCESS"; "asked" ->
--                                                        the place of the worker that the chief asks
-- KEYS deleted      redisacc:{NAME}:parameters:deleted   incarnations that were deleted
-- ARGV place        text    "worker NUMBER"
-- ARGV incarnation  text    the incarnation that the worker has seen
-- ARGV step         int64   the step of the parameters that it has
-- ARGV process      text    identity of the worker's process, without spaces; of no use if a chief asks
-- ARGV asks         flag    whether a chief asks this worker, instead of the worker claiming to have them
--
-- Replies:
-- {'there'}             a version is published; nothing changed
-- {'deleted'}           the parameters were deleted; nothing changed
-- {'claimed', place}    noted; the worker of this place is asked to publish what it has; "": nobody is

-- #include "now_ms"
-- #bind

-- The hash goes when the last worker that waits has gone, or has found its training again.
local KEPT_MS = 60000

if redis.call('HEXISTS', keys.record, 'version') == 1 then
  return {'there'}
end
local marked = redis.call('GET', keys.deleted)
if marked and string.find(' ' .. marked .. ' ', ' ' .. args.incarnation .. ' ', 1, true) then
  return {'deleted'}
end
if args.asks then
  redis.call('HSET', keys.claims, 'asked', args.place)
else
  redis.call('HSET', keys.claims, args.place, args.step .. ' ' .. args.incarnation .. ' '
    .. string.format('%.0f', now_ms()) .. ' ' .. args.process)
end
redis.call('PEXPIRE', keys.claims, KEPT_MS)
return {'claimed', redis.call('HGET', keys.claims, 'asked') or ''}
