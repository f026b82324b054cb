-- Deletes an accumulator, in two calls. The first closes it for everybody, the second removes it; in between the
-- client removes what its parked gradients and taken rounds hold, key by key. A client that dies in between leaves
-- a record that says so, and whoever opens the name next finishes the work.
--
-- KEYS[1] redisacc:{NAME}            the record
-- KEYS[2] redisacc:{NAME}:sums       index -> packed count and sum
-- KEYS[3] redisacc:{NAME}:parked     gradient id -> "order header"
-- KEYS[4] redisacc:{NAME}:small      gradient id -> data of a small one
-- KEYS[5] redisacc:{NAME}:workers    worker -> gradients in this round
-- KEYS[6] redisacc:{NAME}:clients    client -> last request and totals
-- KEYS[7] redisacc:{NAME}:queue      sorted set of tokens by ticket number
-- KEYS[8] redisacc:{NAME}:takers     token -> "num_required lease_end_ms taker"
-- KEYS[9] redisacc:{NAME}:taken      token -> the round that was granted to it
-- KEYS[10] redisacc:{NAME}:folding   held by the client that makes room. By the rules of `redisacc acl` takers may not
--                                    touch it, nor workers the queue, so the server refuses this script to both
-- ARGV[1] incarnation                the one to delete
-- ARGV[2] finish                     "0": close it; "1": remove it, if it is closed
--
-- Replies:
-- {'closed'}                 no handle can use it any more; the second call has to follow
-- {'deleted'}                nothing is left
-- {'missing'}                nothing was there
-- {'replaced'}               there is another incarnation, which was left alone

-- #include "announce"
-- #include "even_when_full"

local record, incarnation, finish = KEYS[1], ARGV[1], ARGV[2]
local closed = 'deleted:' .. incarnation

local current = redis.call('HGET', record, 'incarnation')
if not current then
  return {'missing'}
end
if finish == '0' then
  if current == incarnation then
    even_when_full(record)
    redis.call('HSET', record, 'incarnation', closed)
    announce(record, 'deleted', 'deleted')
    return {'closed'}
  end
  return {current == closed and 'closed' or 'replaced'}
end
if current ~= closed then
  return {'replaced'}
end
redis.call('UNLINK', unpack(KEYS))
return {'deleted'}
