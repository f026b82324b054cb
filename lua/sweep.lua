-- Removes keys that nobody owns any more, after making sure of it in the same moment.
--
-- KEYS[1] redisacc:{NAME}                       the record
-- KEYS[2] redisacc:{NAME}:taken                 token -> the round that was granted to it
-- KEYS[3] redisacc:{NAME}:parked                gradient id -> "order header"
-- KEYS[4..3+N] redisacc:{NAME}:taken:TOKEN:parked   the same of each taken round
-- KEYS[4+N..] redisacc:{NAME}:...               keys to remove; large strings only get an expiry
-- ARGV[1] incarnation                           of the accumulator as it was found, "" where there was none
-- ARGV[2] rounds                                N
-- ARGV[3..2+N] token                            tokens of the taken rounds
-- ARGV[3+N..] owner                             of each key to remove, who would have to be there for it to be in use:
--                                               "part ID": a parked gradient; "round TOKEN": a taken round; "staged":
--                                               nobody, it would have an expiry; "record": the accumulator
--
-- Replies:
-- {'swept', number}          so many keys were removed; the others have an owner or end by themselves
-- {'changed'}                the accumulator or its taken rounds are not those that were found; nothing removed

-- #include "drop"

local record, taken, parked = KEYS[1], KEYS[2], KEYS[3]
local incarnation, rounds = ARGV[1], tonumber(ARGV[2])
local tokens, held = {}, {parked}
for n = 1, rounds do
  tokens[n], held[n + 1] = ARGV[2 + n], KEYS[3 + n]
end

local exists = redis.call('EXISTS', record) == 1
if exists ~= (incarnation ~= '') or (exists and redis.call('HGET', record, 'incarnation') ~= incarnation) then
  return {'changed'}
end
-- A round that was granted since would own gradients that were looked for only in the others.
if redis.call('HLEN', taken) ~= rounds then
  return {'changed'}
end
for _, token in ipairs(tokens) do
  if redis.call('HEXISTS', taken, token) == 0 then
    return {'changed'}
  end
end

local function is_owned(owner)
  local sort, id = string.match(owner, '^(%a+) ?(.*)$')
  if sort == 'part' then
    for _, key in ipairs(held) do
      if redis.call('HEXISTS', key, id) == 1 then
        return true
      end
    end
    return false
  elseif sort == 'round' then
    return redis.call('HEXISTS', taken, id) == 1
  elseif sort == 'record' then
    return exists
  end
  return sort ~= 'staged'
end

local strings, others = {}, {}
for n = 1, #ARGV - 2 - rounds do
  local key, owner = KEYS[3 + rounds + n], ARGV[2 + rounds + n]
  -- What has an expiry is being removed by somebody, or is a lease's.
  if redis.call('PTTL', key) == -1 and not is_owned(owner) then
    if redis.call('TYPE', key).ok == 'string' then
      strings[#strings + 1] = key
    else
      others[#others + 1] = key
    end
  end
end
drop(strings)
if #others > 0 then
  redis.call('UNLINK', unpack(others))
end
return {'swept', tostring(#strings + #others)}
