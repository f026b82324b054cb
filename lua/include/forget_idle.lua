-- #include "count_text"
-- #include "now_ms"

-- A client that has sent nothing for so long may be forgotten.
local FORGET_MS = 3600000

-- Looks at a few clients and forgets those that have been idle. What is looked at is chosen at random, so that every
-- one has its turn without a cursor, and whoever adds a client looks at more than one: the table can't keep growing.
local function forget_idle(clients_key)
  local LOOKED_AT = 4
  local now = now_ms()
  local found = redis.call('HRANDFIELD', clients_key, LOOKED_AT, 'WITHVALUES') or {}
  for i = 1, #found, 2 do
    local seen = parse_count(string.match(found[i + 1], '^%d+ %a+ %-?%d+ %d+ (%d+) '))
    if seen and now - seen > FORGET_MS then
      redis.call('HDEL', clients_key, found[i])
    end
  end
end
