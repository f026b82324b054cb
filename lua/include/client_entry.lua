-- #include "forget_idle"

-- What is known of a client: the field CLIENT of the clients hash is the text
-- "sequence outcome global_step num_accumulated seen_ms applied stale worker".
-- CLIENT is "BORN-RANDOM", where BORN is a time of the server's clock, in milliseconds, before the client's first
-- request.

-- A client that was forgotten must not come back: its last request might be executed once more. So who isn't known, and
-- was born so long ago that it may have been known once, is turned away. The minute is for clocks that differ, of a
-- server and of the one that takes its place.
local UNKNOWN_MS = FORGET_MS - 60000

-- Reads what is known of a client to decide whether a request is new. `sequence` is the text "number acknowledged".
-- Returns the entry for a new one; for one that was executed before, nil and its first reply once more; else nil and
-- {'superseded', last sequence}, {'forgotten', now}, {'lost', last sequence} or {'corrupt', 'clients', text}.
local function read_client(clients_key, client, sequence)
  local number, acknowledged = string.match(sequence, '^(%d+) (%d+)$')
  number, acknowledged = tonumber(number), tonumber(acknowledged)
  local text = redis.call('HGET', clients_key, client)
  if not text then
    local born, now = parse_count(string.match(client, '^(%d+)%-')), now_ms()
    if not born or now - born > UNKNOWN_MS then
      return nil, {'forgotten', count_text(now)}
    elseif acknowledged > 0 then
      return nil, {'lost', '0'}
    end
    return {sequence = number, applied = 0, stale = 0, new = true}
  end
  local last, outcome, step, count, applied, stale =
    string.match(text, '^(%d+) (%a+) (%-?%d+) (%d+) %d+ (%d+) (%d+) ')
  last, applied, stale = parse_count(last), parse_count(applied), parse_count(stale)
  if not (last and applied and stale) then
    return nil, {'corrupt', 'clients', string.sub(text, 1, 64)}
  end
  if number > last then
    if acknowledged > last then
      -- What the client was told has been undone: restarted from older data, or failed over to a replica that was
      -- behind. It must hear of it, and this is the last moment to notice.
      return nil, {'lost', count_text(last)}
    end
    return {sequence = number, applied = applied, stale = stale}
  elseif number == last then
    -- The reply was lost and the client, or redis-py beneath it, sent the request again.
    return nil, {outcome, step, count}, true
  end
  -- An old copy that a dead connection kept back: its sender has long gone on. Executing it would count it twice.
  return nil, {'superseded', count_text(last)}
end

local function write_client(clients_key, client, entry, reply, worker)
  redis.call('HSET', clients_key, client, string.format('%.0f %s %s %s %.0f %.0f %.0f %s',
    entry.sequence, reply[1], reply[2], reply[3], now_ms(), entry.applied, entry.stale, worker))
  if entry.new then
    forget_idle(clients_key)
  end
end
