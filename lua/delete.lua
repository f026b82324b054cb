-- Closes an accumulator for everybody, or removes it once it is closed.
--
-- KEYS record       redisacc:{NAME}              the record of the accumulator
-- KEYS sums         redisacc:{NAME}:sums         row index -> packed count and sum; total -> "gradients rows"
-- KEYS buffered     redisacc:{NAME}:buffered     gradient id -> "order header"
-- KEYS inline       redisacc:{NAME}:inline       gradient id -> data of an inline gradient
-- KEYS workers      redisacc:{NAME}:workers      worker -> its number of gradients in this round
-- KEYS sessions     redisacc:{NAME}:sessions     session id -> its last request, the outcome, and totals
-- KEYS queue        redisacc:{NAME}:queue        sorted set of tokens by ticket number
-- KEYS takers       redisacc:{NAME}:takers       token -> "num_required lease_end_ms taker"
-- KEYS taken        redisacc:{NAME}:taken        token -> the round that was granted to it
-- KEYS recovered    redisacc:{NAME}:recovered    the latest recoveries of taken rounds
-- KEYS compacting   redisacc:{NAME}:compacting   held by the client that compacts
-- KEYS attempts     redisacc:{NAME}:attempts     attempts to store gradients in partitions
-- KEYS crew         redisacc:{NAME}:crew         the leases of the chief and the workers of a training
-- KEYS reducers...  redisacc:{NAME}:reducer      the lease of the reducer; redisacc:{NAME}:reducer:p for each partition
-- ARGV incarnation  text   the incarnation to delete
-- ARGV finish       flag   whether to remove the accumulator, which must be closed, instead of closing it
--
-- Replies:
-- {'closed'}     no handle can use the accumulator any longer; the second call must follow
-- {'deleted'}    nothing is left
-- {'missing'}    nothing was there
-- {'replaced'}   there is another incarnation, which was left alone

-- #include "close_record"
-- #bind

-- Deleting takes two calls of this script: between them the client removes the parts of buffered gradients and taken
-- rounds, key by key. If the client dies in between, the record says so, and the next one to open the name finishes.
--
-- By the rules of `redisacc acl`, takers may not touch `compacting`, nor workers the queue. Because this script names
-- both keys, the server refuses it to either.

local reply = close_record(keys.record, args.incarnation, args.finish, 'deleted')
if reply then
  return reply
end
redis.call('UNLINK', keys.record, keys.sums, keys.buffered, keys.inline, keys.workers, keys.sessions, keys.queue,
  keys.takers, keys.taken, keys.recovered, keys.compacting, keys.attempts, keys.crew, unpack(keys.reducers))
return {'deleted'}
