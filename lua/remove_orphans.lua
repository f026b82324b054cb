-- Removes keys that have no owner.
--
-- KEYS record        redisacc:{NAME}            the record of the accumulator
-- KEYS taken         redisacc:{NAME}:taken      token -> the round that was granted to it
-- KEYS buffered      redisacc:{NAME}:buffered   gradient id -> "order header"
-- KEYS garbage...    redisacc:{NAME}:*          the keys to remove; large strings get an expiry
-- ARGV incarnation   text   incarnation of the accumulator that was found; "" if there was none
-- ARGV owners...     text   for each key to remove, the owner that would mean it is in use: "part ID", a buffered
--                           gradient; "round TOKEN", a taken round; "record", the accumulator
--
-- Replies:
-- {'removed', number}   the number of keys that were removed; the others have an owner or an expiry
-- {'changed'}           the accumulator is not the one that was found; nothing was removed

-- #include "drop_strings"
-- #bind

-- There may be very many taken rounds, so the script does not look for gradients in them. The caller has seen that no
-- round held the gradient, and a gradient that nothing holds never comes back.

local exists = redis.call('EXISTS', keys.record) == 1
if exists ~= (args.incarnation ~= '')
    or (exists and redis.call('HGET', keys.record, 'incarnation') ~= args.incarnation) then
  return {'changed'}
end

local function is_owned(owner)
  local kind, id = string.match(owner, '^(%a+) ?(.*)$')
  if kind == 'part' then
    return redis.call('HEXISTS', keys.buffered, id) == 1
  elseif kind == 'round' then
    return redis.call('HEXISTS', keys.taken, id) == 1
  elseif kind == 'record' then
    return exists
  end
  return true
end

local strings, others = {}, {}
for n, key in ipairs(keys.garbage) do
  -- A key with an expiry is being removed already, or belongs to a lease.
  if redis.call('PTTL', key) == -1 and not is_owned(args.owners[n]) then
    if redis.call('TYPE', key).ok == 'string' then
      strings[#strings + 1] = key
    else
      others[#others + 1] = key
    end
  end
end
drop_strings(strings)
if #others > 0 then
  redis.call('UNLINK', unpack(others))
end
return {'removed', tostring(#strings + #others)}
