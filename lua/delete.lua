-- Closes an accumulator or parameters for everybody, or removes them once they are closed.
--
-- KEYS record       redisacc:{NAME}     the record of the accumulator; of parameters, redisacc:{NAME}:parameters
-- KEYS marks...     redisacc:{NAME}:parameters:deleted   of parameters: the mark of a deletion, incarnations separated
--                                        by spaces, the last one first; it is written with an expiry
-- KEYS others...    redisacc:{NAME}:*   all other keys of a fixed name that it has
-- ARGV incarnation  text   the incarnation to delete
-- ARGV finish       flag   whether to remove the keys of a closed accumulator or closed parameters, instead of closing
-- ARGV wakes        flag   whether takers may be waiting, and are told
--
-- Replies:
-- {'closed'}     no handle can use it now; the second call must follow
-- {'deleted'}    nothing is left
-- {'missing'}    nothing was there
-- {'replaced'}   there is another incarnation, which was left alone

-- #include "announce"
-- #include "even_when_full"
-- #bind

-- Deleting takes two calls of this script, because there may be too much for one: between them the client removes the
-- large strings, key by key. If it dies, the record tells the next client that opens the name or publishes to finish.

-- A process of a training that finds nothing under its name asks the mark whether that was a deletion or a loss of
-- data. The mark has to last for longer than a process may be suspended, or a machine be off, and come back: over a
-- weekend and some days more.
local MARKED_MS = 7 * 86400000
-- How many incarnations are kept: enough for somebody who deletes and publishes the same name again and again.
local MARKED = 16

local function mark(key)
  local kept = {args.incarnation}
  local before = redis.pcall('GET', key)
  -- It is an error if the key has another type.
  if type(before) == 'string' then
    for incarnation in string.gmatch(before, '%S+') do
      if incarnation ~= args.incarnation and #kept < MARKED then
        kept[#kept + 1] = string.sub(incarnation, 1, 64)
      end
    end
  end
  redis.call('SET', key, table.concat(kept, ' '), 'PX', MARKED_MS)
end

local closed = 'deleted:' .. args.incarnation
local current = redis.call('HGET', keys.record, 'incarnation')
if not current then
  return {'missing'}
elseif args.finish and current == closed then
  redis.call('UNLINK', keys.record, unpack(keys.others))
  return {'deleted'}
elseif args.finish then
  return {'replaced'}
elseif current == args.incarnation then
  even_when_full(keys.record)
  redis.call('HSET', keys.record, 'incarnation', closed)
  -- Whoever sees the record closed, or gone, also sees the mark.
  for _, key in ipairs(keys.marks) do
    mark(key)
  end
  announce(keys.record, 'deleted', args.wakes and 'deleted')
  return {'closed'}
end
return {current == closed and 'closed' or 'replaced'}
