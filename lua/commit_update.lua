-- Publishes the version that an optimiser has made of a round, and removes the round: both, or neither.
--
-- KEYS record          redisacc:{NAME}:parameters                 the record of the parameters
-- KEYS attempts        redisacc:{NAME}:parameters:attempts        "BLOB parts" -> when its parts may be removed
-- KEYS taken           redisacc:{NAME}:taken                      token -> the round that was granted to it
-- KEYS taken_sums      redisacc:{NAME}:taken:TOKEN:sums           the sums of the round
-- KEYS taken_buffered  redisacc:{NAME}:taken:TOKEN:buffered       its buffered gradients
-- KEYS taken_inline    redisacc:{NAME}:taken:TOKEN:inline         the data of its inline gradients
-- KEYS taken_workers   redisacc:{NAME}:taken:TOKEN:workers        its workers
-- KEYS round_attempts  redisacc:{NAME}:attempts                   "ATTEMPT parts" -> 0: its parts are to be removed
-- KEYS history...      redisacc:{NAME}:parameters:history         the history of the training; none if nothing is added
-- KEYS parts...        redisacc:{NAME}:parameters:object:BLOB:K   parts in this slot, which still have an expiry
-- KEYS unused...       redisacc:{NAME}:parameters:object:BLOB:K   parts in this slot that only the version before has:
--                                                                 they get an expiry
-- KEYS round_parts...  redisacc:{NAME}:part:ID:K                  parts of the round's gradients
-- ARGV incarnation     text     the incarnation that the client has seen
-- ARGV previous        text     id of the version that this one follows
-- ARGV version         text     id of the version
-- ARGV step            int64    step of the version
-- ARGV replaces        flag     whether it may have the step of the version that it follows, which has lost parts
-- ARGV registered      flag     whether register_update has begun it, and its parts are in partitions
-- ARGV event           text     what waiting readers are told
-- ARGV token           text     id of the take that was granted the round
-- ARGV more            flag     whether acknowledge follows with further parts, because the round has very many
-- ARGV past            text     what is added to the history: "STEP GRADIENTS NAME=MEAN ..." of the round; "": nothing
-- ARGV lengths...      number   bytes of each part in this slot
-- ARGV blobs...        text     "BLOB parts" of each blob that was written to partitions
-- ARGV retired...      text     "BLOB parts" of blobs in partitions that only the version before has
-- ARGV removed...      text     "BLOB parts" of blobs in partitions of still earlier versions, which go at once
-- ARGV fields...       bytes    further fields of the record: names and values, alternately
-- ARGV round_removed... text     "ATTEMPT parts" of the round's gradients in partitions, whose parts the client removes
--
-- Replies:
-- {'published'}              the version is visible, and the round is removed; also if a copy of this request did that
-- {'unknown'}                there is no such round: another chief has recovered it; nothing changed
-- {'expired'}                a part is missing or has another length, or the attempt was given up; nothing changed
-- {'changed'}                another version than the previous one is there; nothing changed: read the record again
-- {'older', step}            the version that is there has this step, which is not lower; nothing changed
-- {'deleting', incarnation}  a client is deleting the parameters, or died while it was; nothing changed
-- {'missing'}                there are no such parameters
-- {'replaced'}               the parameters were deleted and published again
-- {'corrupt', where, text}   the record holds what redisacc never writes; nothing changed

-- #include "end_round"
-- #include "publish_version"
-- #bind

local refusal = refused_publication(keys, args)
if not refusal and not redis.call('HGET', keys.taken, args.token) then
  return {'unknown'}
elseif refusal and refusal[1] ~= 'published' then
  return refusal
end
-- This raises if the key has another type, before anything changes.
redis.call('ZSCORE', keys.round_attempts, '')
if not refusal then
  publish_version(keys, args)
end
end_round(keys, args, keys.round_parts, keys.round_attempts, args.round_removed)
return {'published'}
