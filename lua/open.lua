-- Opens the accumulator of a name, or creates it if the caller wants that.
--
-- KEYS record          redisacc:{NAME}            the record of the accumulator
-- KEYS sums            redisacc:{NAME}:sums       row index -> packed count and sum; and their total
-- KEYS buffered        redisacc:{NAME}:buffered   gradient id -> "order header"
-- KEYS inline          redisacc:{NAME}:inline     gradient id -> data of an inline gradient
-- KEYS workers         redisacc:{NAME}:workers    worker -> its number of gradients in this round
-- KEYS sessions        redisacc:{NAME}:sessions   session id -> its last request, the outcome, and totals
-- ARGV incarnation     text     random id, which the accumulator gets if this call creates it
-- ARGV format          text     version of the data model
-- ARGV kind            text     "dense", "sparse" or "tree"
-- ARGV dtype           text     such as "float32"
-- ARGV shape           text     such as "[100,-1]", or "unknown"; for a tree such as "7 leaves"
-- ARGV reduction_type  text     "MEAN" or "SUM"
-- ARGV sparse_mean     text     "index" or "round": the gradients whose number divides the sum of a row
-- ARGV missing         text     "zero" or "skip": the divisor of the mean of a leaf that some gradients lack
-- ARGV tree            text     the structure and the leaves of a tree, as JSON; "" if it is none
-- ARGV chunk           text     elements of a row of a dense section
-- ARGV lease_ms        number   how long a private accumulator outlives its owner; 0 for a shared one, which has no end
-- ARGV buffer_limit    text     bytes that the buffered gradients of a round may have in total
-- ARGV once_per_worker text     "1" if a round accepts one gradient of each worker only, else "0"
-- ARGV max_staleness   text     how many steps a gradient's local_step may be below the global step
-- ARGV staleness_weight text    "constant" or "inverse_sqrt": the factor for late gradients
-- ARGV normalize       text     "weights" or "count": the divisor of "MEAN"
-- ARGV order           text     "arrival" or "worker": the order in which the gradients of a round are added
-- ARGV partitions      text     the numbers of the slots that hold the parts of gradients, such as "0,1,4"; "" if that
--                               is the slot of the record
-- ARGV create          flag     whether to create the accumulator if there is none
--
-- Replies:
-- {'opened', struct, now_ms, incarnation, format, kind, dtype, shape, reduction_type, sparse_mean, missing, tree,
--     chunk, lease_ms, buffer_limit, once_per_worker, max_staleness, staleness_weight, normalize, order, partitions,
--     takes, losses}
--                             the accumulator as it was created. struct is "yes" if the server's Lua has that library;
--                             now_ms is the server's clock
-- {'deleting', incarnation}   the accumulator is being deleted by a client that may have died: finish, and open again
-- {'missing'}                 there is no such accumulator, and none was to be created
-- {'remains', key}            there is no record, but this key of a former accumulator; nothing changed
-- {'other_format', format}    the record belongs to another version of the data model; nothing changed
-- {'corrupt', where, text}    the record holds what redisacc never writes; nothing changed

-- #include "forget_idle_sessions"
-- #include "extend_leases"
-- #bind

local NAMES = {
  'incarnation', 'format', 'kind', 'dtype', 'shape', 'reduction_type', 'sparse_mean', 'missing', 'tree',
  'chunk', 'lease_ms', 'buffer_limit', 'once_per_worker', 'max_staleness', 'staleness_weight', 'normalize',
  'order', 'partitions', 'takes', 'losses',
}
-- A record has these fields only if they differ from this.
local ABSENT = {
  max_staleness = '0', staleness_weight = 'constant', normalize = 'weights', order = 'arrival', partitions = '',
  losses = '0',
}

forget_idle_sessions(keys.sessions)
if redis.call('EXISTS', keys.record) == 0 then
  if not args.create then
    return {'missing'}
  end
  -- A key without its record means that the record was evicted or removed by hand. A new record would take over sums
  -- that it doesn't count.
  for _, key in ipairs({keys.sums, keys.buffered, keys.inline, keys.workers, keys.sessions}) do
    if redis.call('EXISTS', key) == 1 then
      return {'remains', key}
    end
  end
  -- A server searches a small hash from its first field on, so those that every gradient needs come first.
  redis.call('HSET', keys.record, 'incarnation', args.incarnation, 'global_step', '0', 'num_accumulated', '0',
    'round_shape', '', 'applied', '0', 'wanted', '0', 'lease_ms', count_text(args.lease_ms), 'once_per_worker',
    args.once_per_worker, 'buffered_bytes', '0', 'buffer_limit', args.buffer_limit, 'takes', '0', 'tickets', '0',
    'places', '0', 'stale', '0', 'repeated', '0', 'duplicates', '0', 'format', args.format, 'kind', args.kind,
    'dtype', args.dtype, 'shape', args.shape, 'reduction_type', args.reduction_type, 'sparse_mean', args.sparse_mean,
    'missing', args.missing, 'tree', args.tree, 'chunk', args.chunk, 'created_ms', count_text(now_ms()))
  local optional = {
    max_staleness = args.max_staleness, staleness_weight = args.staleness_weight, normalize = args.normalize,
    order = args.order, partitions = args.partitions,
  }
  for name, value in pairs(optional) do
    if value ~= ABSENT[name] then
      redis.call('HSET', keys.record, name, value)
    end
  end
  extend_leases(args.lease_ms, keys.record)
end

local fields = redis.call('HMGET', keys.record, unpack(NAMES))
local format = fields[2]
if format and format ~= args.format then
  -- Its other fields may have other names, so nothing else can be said of it.
  return {'other_format', format}
end
-- rawget, because Redis raises an error if a script reads a global that doesn't exist.
local reply = {'opened', rawget(_G, 'struct') and 'yes' or 'no', count_text(now_ms())}
for i, name in ipairs(NAMES) do
  reply[i + 3] = fields[i] or ABSENT[name]
  if not reply[i + 3] then
    return {'corrupt', name, ''}
  end
end
local deleted = string.match(fields[1], '^deleted:(.*)$')
if deleted then
  return {'deleting', deleted}
end
return reply
