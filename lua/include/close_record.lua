-- #include "announce"
-- #include "even_when_full"

-- The beginning of a deletion, which takes two calls of a script: the first closes the record, and the second removes
-- it. Between them the client removes what is too much for a script, key by key; if it dies, the record tells others to
-- finish. Returns the reply, or nil if the record is closed and the keys are to be removed now. finish: whether it is
-- the second call. wake: what waiting takers are told, if there can be any.
local function close_record(record_key, incarnation, finish, wake)
  local closed = 'deleted:' .. incarnation
  local current = redis.call('HGET', record_key, 'incarnation')
  if not current then
    return {'missing'}
  end
  if finish and current == closed then
    return nil
  elseif finish then
    return {'replaced'}
  elseif current == incarnation then
    even_when_full(record_key)
    redis.call('HSET', record_key, 'incarnation', closed)
    announce(record_key, 'deleted', wake)
    return {'closed'}
  end
  return {current == closed and 'closed' or 'replaced'}
end
