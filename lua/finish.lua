-- Notes that no further version of parameters will be published, or that there will be more after all.
--
-- KEYS record       redisacc:{NAME}:parameters   the record of the parameters
-- ARGV incarnation  text    the incarnation that the client has seen
-- ARGV finished     flag    whether the step that is published is the last one
--
-- Replies:
-- {'noted'}         the record says so, and everybody who waits for a version has been told
-- {'missing'}       there are no such parameters
-- {'replaced'}      the parameters were deleted and published again

-- #bind

local incarnation = redis.call('HGET', keys.record, 'incarnation')
if not incarnation then
  return {'missing'}
elseif incarnation ~= args.incarnation then
  return {'replaced'}
end
redis.call('HSET', keys.record, 'finished', args.finished and '1' or '0')
redis.call('PUBLISH', keys.record .. ':events', args.finished and 'finished' or 'continued')
return {'noted'}
