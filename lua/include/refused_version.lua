-- #include "integer_text"

-- Returns the reply that refuses a version of parameters, or nil if it may follow what is published. request: see
-- publish.
local function refused_version(record_key, request, deleted_key)
  local current = redis.call('HMGET', record_key, 'incarnation', 'version', 'step')
  local incarnation, version, step = current[1], current[2], current[3]
  if not incarnation then
    if redis.call('EXISTS', record_key) == 1 then
      return {'corrupt', 'incarnation', ''}
    elseif request.previous ~= '' then
      return {'missing'}
    end
    -- Somebody restores what the server has lost, in the same incarnation. What was deleted must not come back.
    local marked = deleted_key and redis.call('GET', deleted_key)
    if marked and string.find(' ' .. marked .. ' ', ' ' .. request.incarnation .. ' ', 1, true) then
      return {'changed'}
    end
    return nil
  end
  local deleted = string.match(incarnation, '^deleted:(.*)$')
  if deleted then
    return {'deleting', deleted}
  elseif version == request.version then
    return {'published'}
  elseif incarnation ~= request.incarnation then
    return {request.previous == '' and 'changed' or 'replaced'}
  elseif not version and not step then
    -- An attempt to publish the first version in partitions has been registered.
    if request.previous == '' then
      return nil
    end
    return {'changed'}
  elseif not is_integer_text(step or '') then
    return {'corrupt', 'step', string.sub(step or '', 1, 64)}
  elseif version ~= request.previous then
    return {'changed'}
  elseif not integer_text_less(step, request.step) and not (request.replaces and step == request.step) then
    return {'older', step}
  end
  return nil
end
