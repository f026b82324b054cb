-- Adds a step to the history of a training, which stays at about KEPT steps: once it has more, only steps that are
-- multiples of twice the stride are added, and each of them removes an odd multiple of the old one, the earliest first.
-- So no call has much to do, and the history of a run of any length covers all of it.
--
-- Returns the entry. text: "STEP GRADIENTS" and the metrics. now: the server's clock, as text.
local function keep_history(record_key, history_key, text, now)
  local KEPT = 1000
  -- How many entries one call looks at, and how often: it usually needs one or two.
  local PIECE, PIECES = 8, 2
  local step, rest = string.match(text, '^(%S+) (.*)$')
  local entry = step .. ' ' .. now .. ' ' .. rest
  local found = redis.call('HMGET', record_key, 'history_latest', 'history_stride', 'history_thinned')
  local stride, thinned = tonumber(found[2]) or 1, tonumber(found[3])
  if not found[1] then
    -- It is of parameters whose record somebody has removed.
    redis.call('UNLINK', history_key)
  end
  if tonumber(step) % stride ~= 0 then
    return entry
  end
  redis.call('ZADD', history_key, step, entry)
  local excess = redis.call('ZCARD', history_key) - KEPT
  if excess <= 0 then
    return entry
  end
  for _ = 1, PIECES do
    if not thinned or thinned ~= thinned then
      -- A new pass begins.
      stride, thinned = 2 * stride, -math.huge
    end
    local from = thinned == -math.huge and '-inf' or string.format('(%.17g', thinned)
    local entries = redis.call('ZRANGEBYSCORE', history_key, from, '+inf', 'WITHSCORES', 'LIMIT', 0, PIECE)
    for n = 1, #entries, 2 do
      if excess > 0 then
        thinned = tonumber(entries[n + 1])
        if thinned % stride ~= 0 then
          redis.call('ZREM', history_key, entries[n])
          excess = excess - 1
        end
      end
    end
    if excess == 0 then
      break
    elseif #entries < 2 * PIECE then
      -- The end.
      thinned = nil
    end
  end
  redis.call('HSET', record_key, 'history_stride', string.format('%.17g', stride),
    'history_thinned', thinned and string.format('%.17g', thinned) or '')
  return entry
end
