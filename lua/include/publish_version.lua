-- #include "even_when_full"
-- #include "notify"
-- #include "now_ms"
-- #include "refused_version"

-- Returns the reply that refuses a version of parameters, or nil if it may be published: its parts are there. keys,
-- args: see publish.
local function refused_publication(keys, args, deleted_key)
  local refusal = refused_version(keys.record, args, deleted_key)
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

-- Makes a version of parameters visible, unless it is refused. keys, args: see publish.
local function publish_version(keys, args)
  -- How long readers of the version before may still fetch its parts.
  local RETIRED_MS = 60000
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
