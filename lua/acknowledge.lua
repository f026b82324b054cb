-- Removes a round that its taker has in memory, or some of its parts.
--
-- KEYS record            redisacc:{NAME}                        the record of the accumulator
-- KEYS taken             redisacc:{NAME}:taken                  token -> the round that was granted to it
-- KEYS taken_sums        redisacc:{NAME}:taken:TOKEN:sums       the sums of the round
-- KEYS taken_buffered    redisacc:{NAME}:taken:TOKEN:buffered   its buffered gradients
-- KEYS taken_inline      redisacc:{NAME}:taken:TOKEN:inline     the data of its inline gradients
-- KEYS taken_workers     redisacc:{NAME}:taken:TOKEN:workers    its workers
-- KEYS round_attempts    redisacc:{NAME}:attempts               "ATTEMPT parts" -> 0: its parts are to be removed
-- KEYS round_parts...    redisacc:{NAME}:part:ID:K              parts of its gradients; large ones get an expiry
-- ARGV token             text   id of the take
-- ARGV more              flag   whether calls with further parts follow, because the round has very many
-- ARGV metrics           text   "NAME=MEAN ..." of the metrics of its gradients; "": they had none
-- ARGV round_removed...  text   "ATTEMPT parts" of its gradients in partitions, whose parts the client then removes
--
-- Replies:
-- {'acknowledged'}   the round, or these parts of it, are removed
-- {'unknown'}        there is no such round: it was acknowledged before, recovered by another taker, or deleted

-- #include "end_round"
-- #bind

if end_round(keys, args) then
  if args.metrics ~= '' and redis.call('EXISTS', keys.record) == 1 then
    -- They only serve people, so a server that is full may refuse them.
    redis.pcall('HSET', keys.record, 'metrics', args.metrics)
  end
  return {'acknowledged'}
end
return {'unknown'}
