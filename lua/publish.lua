-- Publishes a version of parameters whose parts have all been written, and removes the round, if any, that it follows
-- from: both, or neither.
--
-- KEYS record           redisacc:{NAME}:parameters                 the record of the parameters
-- KEYS attempts         redisacc:{NAME}:parameters:attempts        "BLOB parts" -> when its parts may be removed
-- KEYS deleted          redisacc:{NAME}:parameters:deleted         incarnations that were deleted
-- KEYS taken            redisacc:{NAME}:taken                      token -> the round that was granted to it
-- KEYS taken_sums       redisacc:{NAME}:taken:TOKEN:sums           the sums of the round
-- KEYS taken_buffered   redisacc:{NAME}:taken:TOKEN:buffered       its buffered gradients
-- KEYS taken_inline     redisacc:{NAME}:taken:TOKEN:inline         the data of its inline gradients
-- KEYS taken_workers    redisacc:{NAME}:taken:TOKEN:workers        its workers
-- KEYS round_attempts   redisacc:{NAME}:attempts                   "ATTEMPT parts" -> 0: its parts are to be removed
-- KEYS history...       redisacc:{NAME}:parameters:history         the history; none if nothing is added to it
-- KEYS parts...         redisacc:{NAME}:parameters:object:BLOB:K   parts in this slot, which still have an expiry
-- KEYS unused...        redisacc:{NAME}:parameters:object:BLOB:K   parts in this slot that only the version before has:
--                                                                  they get an expiry
-- KEYS round_parts...   redisacc:{NAME}:part:ID:K                  parts of the round's gradients
-- ARGV incarnation      text     the incarnation that the client has seen; for a first version, the one that it gets
-- ARGV previous         text     id of the version that this one follows; "" if it is the first
-- ARGV version          text     id of the version
-- ARGV step             int64    step of the version
-- ARGV replaces         flag     whether it may have the step of the version that it follows, which has lost parts
-- ARGV registered       flag     whether register_version has begun it, and its parts are in partitions
-- ARGV event            text     what waiting readers are told
-- ARGV token            text     id of the take that was granted the round; "": the version belongs to no round
-- ARGV more             flag     whether acknowledge follows with further parts, because the round has very many
-- ARGV past             text     what is added to the history: "STEP GRADIENTS NAME=MEAN ..." of the round; "": nothing
-- ARGV lengths...       number   bytes of each part in this slot
-- ARGV blobs...         text     "BLOB parts" of each blob that was written to partitions
-- ARGV retired...       text     "BLOB parts" of blobs in partitions that only the version before has
-- ARGV removed...       text     "BLOB parts" of blobs in partitions of still earlier versions, which go at once
-- ARGV fields...        bytes    further fields of the record: names and values, alternately
-- ARGV round_removed... text     "ATTEMPT parts" of the round's gradients in partitions, whose parts the client removes
--
-- Replies:
-- {'published'}              the version is visible, and the round is removed; also if a copy of this request did that
-- {'unknown'}                there is no such round: another process has recovered it; nothing changed
-- {'expired'}                a part is missing or has another length, or the attempt was given up, and its parts may be
--                            gone: begin a new attempt; nothing changed
-- {'changed'}                another version than the previous one is there; nothing changed: read the record again
-- {'older', step}            the version that is there has this step, which is not lower; nothing changed
-- {'deleting', incarnation}  a client is deleting the parameters, or died while it was; nothing changed
-- {'missing'}                there are no such parameters
-- {'replaced'}               the parameters were deleted and published again
-- {'corrupt', where, text}   the record holds what redisacc never writes; nothing changed

-- #include "end_round"
-- #include "even_when_full"
-- #include "notify"
-- #include "now_ms"
-- #include "refused_version"
-- #bind

-- How long readers of the version before may still fetch its parts.
local RETIRED_MS = 60000

-- Returns the reply that refuses the version, or nil if it may be published: its parts are there.
local function refused_publication()
  local refusal = refused_version(keys.record, args, keys.deleted)
  if refusal then
    return refusal
  end
  for k, part in ipairs(keys.parts) do
    if redis.call('STRLEN', part) ~= args.lengths[k] then
      return {'expired'}
    end
  end
  -- If the record of a first version has expired, the numbers of its partitions have expired with it.
  if args.registered and redis.call('EXISTS', keys.record) == 0 then
    return {'expired'}
  end
  for _, blob in ipairs(args.blobs) do
    if tonumber(redis.call('ZSCORE', keys.attempts, blob) or 0) == 0 then
      return {'expired'}
    end
  end
  return nil
end

-- Makes the version visible.
local function publish_version()
  if keys.history[1] then
    -- This raises if the key has another type, before anything changes.
    redis.call('ZCARD', keys.history[1])
  end
  -- The parts already occupy their memory, so refusing the version now would free none.
  even_when_full(keys.record)
  for _, part in ipairs(keys.parts) do
    redis.call('PERSIST', part)
  end
  for _, part in ipairs(keys.unused) do
    redis.call('PEXPIRE', part, RETIRED_MS)
  end
  local now = now_ms()
  if args.registered then
    for _, blob in ipairs(args.blobs) do
      redis.call('ZREM', keys.attempts, blob)
    end
    -- No script can give parts in partitions an expiry, so the list says when a sweeper may remove them.
    local retired_until = string.format('%.0f', now + RETIRED_MS)
    for _, blob in ipairs(args.retired) do
      redis.call('ZADD', keys.attempts, retired_until, blob)
    end
    for _, blob in ipairs(args.removed) do
      redis.call('ZADD', keys.attempts, 'XX', 0, blob)
    end
    redis.call('PERSIST', keys.record)
  end
  local published_ms = string.format('%.0f', now)
  if keys.history[1] then
    -- #include "keep_history"
    args.fields[#args.fields + 1] = 'history_latest'
    args.fields[#args.fields + 1] = keep_history(keys.record, keys.history[1], args.past, published_ms)
  end
  redis.call('HSET', keys.record, 'incarnation', args.incarnation, 'version', args.version, 'step', args.step,
    'published_ms', published_ms, unpack(args.fields))
  redis.call('HSETNX', keys.record, 'created_ms', published_ms)
  notify(keys.record .. ':events', args.event)
end

local refusal = refused_publication()
if refusal and refusal[1] ~= 'published' then
  return refusal
end
local has_round = args.token ~= ''
if has_round then
  if not refusal and not redis.call('HGET', keys.taken, args.token) then
    return {'unknown'}
  end
  -- This raises if the key has another type, before anything changes.
  redis.call('ZSCORE', keys.round_attempts, '')
end
if not refusal then
  publish_version()
end
if has_round then
  end_round(keys, args)
end
return {'published'}
