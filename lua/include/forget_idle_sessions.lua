-- #include "count_text"
-- #include "now_ms"
-- #include "forget_ms"

-- Checks a few sessions and forgets the idle ones. They are chosen at random, so that every session has its turn
-- without a cursor. Each new session checks more than one, so that the table can't keep growing.
local function forget_idle_sessions(sessions_key)
  local NUM_CHECKED = 4
  local now = now_ms()
  local found = redis.call('HRANDFIELD', sessions_key, NUM_CHECKED, 'WITHVALUES') or {}
  for i = 1, #found, 2 do
    local seen = parse_count(string.match(found[i + 1], '^%d+ %a+ %-?%d+ %d+ (%d+) '))
    if seen and now - seen > FORGET_MS then
      redis.call('HDEL', sessions_key, found[i])
    end
  end
end
