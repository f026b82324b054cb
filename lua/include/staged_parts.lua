-- The client SETs large parts just before the script that needs them, each under a key with an expiry. The script that
-- takes them over renames them.

-- Returns a refusal, and removes the staged parts, because a request that is sent again stages them again.
local function refuse_parts(staged_keys, reply)
  if #staged_keys > 0 then
    redis.call('UNLINK', unpack(staged_keys))
  end
  return reply
end

-- Returns the reply {'unstaged', part} if a part is missing or has another length, else nil.
local function unstaged_part(staged_keys, lengths)
  for k, staged in ipairs(staged_keys) do
    if redis.call('STRLEN', staged) ~= lengths[k] then
      return {'unstaged', tostring(k)}
    end
  end
  return nil
end

-- Gives the parts their names, under which they do not expire. RENAME needs no memory.
local function keep_parts(staged_keys, part_keys)
  for k, part in ipairs(part_keys) do
    redis.call('RENAME', staged_keys[k], part)
    redis.call('PERSIST', part)
  end
end
