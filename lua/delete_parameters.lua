-- Closes parameters for everybody, or removes their record once they are closed.
--
-- KEYS record       redisacc:{NAME}:parameters           the record of the parameters
-- KEYS attempts     redisacc:{NAME}:parameters:attempts  attempts to store blobs in partitions
-- KEYS guard        redisacc:{NAME}:parameters:guard     never exists
-- ARGV incarnation  text   the incarnation to delete
-- ARGV finish       flag   whether to remove the record, which must be closed, instead of closing it
--
-- Replies:
-- {'closed'}     no handle can use the parameters any longer; the second call must follow
-- {'deleted'}    nothing is left
-- {'missing'}    nothing was there
-- {'replaced'}   there is another incarnation, which was left alone

-- #include "close_record"
-- #bind

-- Between the two calls the client removes the objects, key by key. If it dies in between, the record says so, and the
-- next one to publish finishes.
--
-- By the rules of `redisacc acl`, only operators may touch `guard`. Because this script names it, the server refuses it
-- to everybody else.

local reply = close_record(keys.record, args.incarnation, args.finish)
if reply then
  return reply
end
redis.call('UNLINK', keys.record, keys.attempts, keys.guard)
return {'deleted'}
