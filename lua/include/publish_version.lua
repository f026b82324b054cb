-- #include "notify"
-- #include "now_ms"

-- Makes a version of parameters visible, and tells waiting readers. request: see publish.
local function publish_version(record_key, request)
  local now = string.format('%.0f', now_ms())
  redis.call('HSET', record_key, 'incarnation', request.incarnation, 'version', request.version, 'step', request.step,
    'published_ms', now, unpack(request.fields))
  redis.call('HSETNX', record_key, 'created_ms', now)
  notify(record_key .. ':events', request.event)
end
