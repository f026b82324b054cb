-- Changes fields of the record of parameters besides the version: whether it is the last, how many workers there are.
--
-- KEYS record       redisacc:{NAME}:parameters   the record of the parameters
-- ARGV incarnation  text    the incarnation that the client has seen
-- ARGV event        text    message to waiting readers
-- ARGV fields...    bytes   fields of the record: names and values, alternately
--
-- Replies:
-- {'noted'}         the record says so, and everybody who waits for a version has been told
-- {'missing'}       there are no such parameters
-- {'replaced'}      the parameters were deleted and published again

-- #include "notify"
-- #bind

local incarnation = redis.call('HGET', keys.record, 'incarnation')
if not incarnation then
  return {'missing'}
elseif incarnation ~= args.incarnation then
  return {'replaced'}
end
redis.call('HSET', keys.record, unpack(args.fields))
notify(keys.record .. ':events', args.event)
return {'noted'}
