-- Closes an accumulator or parameters for everybody, or removes them once they are closed.
--
-- KEYS record       redisacc:{NAME}     the record of the accumulator; of parameters, redisacc:{NAME}:parameters
-- KEYS others...    redisacc:{NAME}:*   all other keys of a fixed name that it has
-- ARGV incarnation  text   the incarnation to delete
-- ARGV finish       flag   whether to remove the keys of a closed accumulator or closed parameters, instead of closing
-- ARGV wakes        flag   whether takers may be waiting, and are told
--
-- Replies:
-- {'closed'}     no handle can use it now; the second call must follow
-- {'deleted'}    nothing is left
-- {'missing'}    nothing was there
-- {'replaced'}   there is another incarnation, which was left alone

-- #include "announce"
-- #include "even_when_full"
-- #bind

-- Deleting takes two calls of this script, because there may be too much for one: between them the client removes the
-- large strings, key by key. If it dies, the record tells the next client that opens the name or publishes to finish.

local closed = 'deleted:' .. args.incarnation
local current = redis.call('HGET', keys.record, 'incarnation')
if not current then
  return {'missing'}
elseif args.finish and current == closed then
  redis.call('UNLINK', keys.record, unpack(keys.others))
  return {'deleted'}
elseif args.finish then
  return {'replaced'}
elseif current == args.incarnation then
  even_when_full(keys.record)
  redis.call('HSET', keys.record, 'incarnation', closed)
  announce(keys.record, 'deleted', args.wakes and 'deleted')
  return {'closed'}
end
return {current == closed and 'closed' or 'replaced'}
