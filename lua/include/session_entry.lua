-- #include "count_text"
-- #include "now_ms"
-- #include "forget_ms"

-- The field SESSION of the sessions hash has the text "sequence outcome global_step num_accumulated seen_ms applied
-- stale worker": the last request of the session, and totals. SESSION is "BORN-RANDOM", where BORN is a time of the
-- server's clock, in milliseconds, before the session's first request.

-- A forgotten session must not come back, because its last request could be executed a second time. An unknown session
-- is therefore refused if it is old enough to have been forgotten. The minute allows for the difference between the
-- clocks of a server and of its successor.
local UNKNOWN_MS = FORGET_MS - 60000

-- Reads what is known of a session; sequence 0 if it is new. Returns nil and a reply if the session must be refused:
-- {'forgotten', now_ms} or {'corrupt', 'sessions', text}.
local function read_session(sessions_key, session)
  local text = redis.call('HGET', sessions_key, session)
  if not text then
    local born, now = parse_count(string.match(session, '^(%d+)%-')), now_ms()
    if not born or now - born > UNKNOWN_MS then
      return nil, {'forgotten', count_text(now)}
    end
    return {sequence = 0, applied = 0, stale = 0, new = true}
  end
  local sequence, outcome, step, count, applied, stale =
    string.match(text, '^(%d+) (%a+) (%-?%d+) (%d+) %d+ (%d+) (%d+) ')
  sequence, applied, stale = parse_count(sequence), parse_count(applied), parse_count(stale)
  if not (sequence and applied and stale) then
    return nil, {'corrupt', 'sessions', string.sub(text, 1, 64)}
  end
  return {
    sequence = sequence, outcome = outcome, global_step = step, num_accumulated = count,
    applied = applied, stale = stale,
  }
end

-- Stores a request, which is entry.sequence, with its reply as the last one of the session.
local function write_session(sessions_key, session, entry, reply, worker)
  redis.call('HSET', sessions_key, session, string.format('%.0f %s %s %s %.0f %.0f %.0f %s',
    entry.sequence, reply[1], reply[2], reply[3], now_ms(), entry.applied, entry.stale, worker))
  if entry.new then
    -- #include "forget_idle_sessions"
    forget_idle_sessions(sessions_key)
  end
end
