-- Renews the lease of an upload that is under way, and says whether its gradient would still be accepted.
--
-- KEYS record       redisacc:{NAME}                    the record of the accumulator
-- KEYS workers      redisacc:{NAME}:workers            worker -> its number of gradients in this round
-- KEYS attempts     redisacc:{NAME}:attempts           "ATTEMPT parts" -> end of its lease; 0: its parts are to go
-- KEYS place...     redisacc:{NAME}:place:ID           the place of the gradient, with an expiry
-- KEYS parts...     redisacc:{NAME}:part:ID:K          the parts that were written, with an expiry
-- ARGV incarnation  text     the incarnation that the handle opened
-- ARGV worker       text     name under which the gradient will be counted
-- ARGV local_step   int64    the step for which the gradient is computed
-- ARGV own_step     flag     whether it is dropped if it is of a later step than the round
-- ARGV attempt      text     "ATTEMPT parts" if its parts are in partitions; else ""
-- ARGV lease_ms     number   how long the attempt may take from now on, in milliseconds
-- ARGV expiry_ms    number   expiry of place and parts, in milliseconds
-- ARGV message      text     tells takers and reducers that the upload continues
--
-- Replies:
-- {'renewed'}                the upload may continue
-- {'over'}                   its gradient would be dropped: the step has passed, or the round has one of this worker;
--                            nothing changed
-- {'expired'}                the attempt was given up, and its parts may be gone; nothing changed
-- {'missing'}                there is no such accumulator
-- {'replaced'}               the accumulator was deleted and created again
-- {'corrupt', where, text}   a key or field holds what redisacc never writes; nothing changed

-- #include "read_record"
-- #include "accepted_staleness"
-- #include "now_ms"
-- #include "notify"
-- #bind

local record, refusal = read_record(keys.record, args.incarnation, {'once_per_worker', 'max_staleness'}, 1)
if not record then
  return refusal
end
if not accepted_staleness(record, args)
  or (record.once_per_worker > 0 and redis.call('HSTRLEN', keys.workers, args.worker) > 0) then
  return {'over'}
end
if args.attempt ~= '' then
  -- A lease of 0 must stay 0: somebody may be removing the parts.
  if tonumber(redis.call('ZSCORE', keys.attempts, args.attempt) or 0) == 0 then
    return {'expired'}
  end
  redis.call('ZADD', keys.attempts, 'XX', count_text(now_ms() + args.lease_ms), args.attempt)
end
-- This may arrive when the gradient counts. Its parts have no expiry then, or that of a private accumulator.
for _, written in ipairs({keys.place, keys.parts}) do
  for _, key in ipairs(written) do
    local left = redis.call('PTTL', key)
    if left > 0 and left < args.expiry_ms then
      redis.call('PEXPIRE', key, args.expiry_ms)
    end
  end
end
notify(keys.record .. ':wake', args.message)
return {'renewed'}
