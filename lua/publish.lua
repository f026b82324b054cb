-- Publishes a version of parameters after all its parts have been written.
--
-- KEYS record       redisacc:{NAME}:parameters                 the record of the parameters
-- KEYS attempts     redisacc:{NAME}:parameters:attempts        "BLOB parts" -> when its parts may be removed
-- KEYS deleted      redisacc:{NAME}:parameters:deleted         incarnations that were deleted
-- KEYS history...   redisacc:{NAME}:parameters:history         the history of the training; none if nothing is added
-- KEYS parts...     redisacc:{NAME}:parameters:object:BLOB:K   parts in this slot, which still have an expiry
-- KEYS unused...    redisacc:{NAME}:parameters:object:BLOB:K   parts in this slot that only the version before has:
--                                                              they get an expiry
-- ARGV incarnation  text     the incarnation that the client has seen; for a first version, the one that it gets
-- ARGV previous     text     id of the version that this one follows; "" if it is the first
-- ARGV version      text     id of the version
-- ARGV step         int64    step of the version
-- ARGV replaces     flag     whether it may have the step of the version that it follows, which has lost parts
-- ARGV registered   flag     whether register_version has begun it, and its parts are in partitions
-- ARGV event        text     what waiting readers are told
-- ARGV past         text     what is added to the history: "STEP GRADIENTS NAME=MEAN ..." of the round; "": nothing
-- ARGV lengths...   number   bytes of each part in this slot
-- ARGV blobs...     text     "BLOB parts" of each blob that was written to partitions
-- ARGV retired...   text     "BLOB parts" of blobs in partitions that only the version before has
-- ARGV removed...   text     "BLOB parts" of blobs in partitions of still earlier versions, which go at once
-- ARGV fields...    bytes    further fields of the record: names and values, alternately
--
-- Replies:
-- {'published'}              the version is visible; also if it was already, because a request was sent again
-- {'expired'}                a part is missing or has another length, or the attempt was given up, and its parts may be
--                            gone: begin a new attempt; nothing changed
-- {'changed'}                another version than the previous one is there; nothing changed: read the record again
-- {'older', step}            the version that is there has this step, which is not lower; nothing changed
-- {'deleting', incarnation}  a client is deleting the parameters, or died while it was; nothing changed
-- {'missing'}                there are no such parameters
-- {'replaced'}               the parameters were deleted and published again
-- {'corrupt', where, text}   the record holds what redisacc never writes; nothing changed

-- #include "publish_version"
-- #bind

local refusal = refused_publication(keys, args, keys.deleted)
if refusal then
  return refusal
end
publish_version(keys, args)
return {'published'}
