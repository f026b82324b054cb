-- Grants the current round to this taker if enough gradients have arrived, or for long enough, and no taker is before
-- it, and otherwise queues the taker or renews its lease in the queue.
--
-- KEYS record          redisacc:{NAME}                        the record of the accumulator
-- KEYS sums            redisacc:{NAME}:sums                   row index -> packed count and sum; and their total
-- KEYS buffered        redisacc:{NAME}:buffered               gradient id -> "order header", "order*weight header"
-- KEYS inline          redisacc:{NAME}:inline                 gradient id -> data of an inline gradient
-- KEYS workers         redisacc:{NAME}:workers                worker -> its number of gradients in this round
-- KEYS sessions        redisacc:{NAME}:sessions               session id -> its last request, the outcome, and totals
-- KEYS queue           redisacc:{NAME}:queue                  sorted set of tokens by ticket number
-- KEYS takers          redisacc:{NAME}:takers                 token -> "required lease_end_ms taker"
-- KEYS taken           redisacc:{NAME}:taken                  token -> the round that was granted to it
-- KEYS taken_sums      redisacc:{NAME}:taken:TOKEN:sums       the sums of the granted round
-- KEYS taken_buffered  redisacc:{NAME}:taken:TOKEN:buffered   its buffered gradients
-- KEYS taken_inline    redisacc:{NAME}:taken:TOKEN:inline     the data of its inline gradients
-- KEYS taken_workers   redisacc:{NAME}:taken:TOKEN:workers    its workers
-- ARGV incarnation     text     the incarnation that the handle opened
-- ARGV token           text     id of this take; the same one again gets the same round
-- ARGV num_required    number   the round is not granted while num_accumulated < num_required; at least 1
-- ARGV min_weight      number   nor while the sum of its weights is less than this, apart from rounding; 0 for any
-- ARGV most            number   a round that has both is granted if num_accumulated >= most; at least num_required
-- ARGV grace_ms        number   or this long after the gradient that completed both
-- ARGV lease_ms        number   the taker loses its place in the queue unless it asks again within this time
-- ARGV taker           text     name of the taker
-- ARGV session         text     id of the sender
-- ARGV sequence        number   number of the take; a session's numbers grow
-- ARGV acknowledged    number   the last request whose outcome the session knows; 0 if there is none
-- ARGV takes           number   the most rounds that the accumulator has granted, as far as the handle knows
-- ARGV losses          number   how often the accumulator has gone back to older data, as far as the handle knows
--
-- Replies:
-- {'granted', global_step, num_accumulated, round_shape, staleness, total_weight}
--                                                          the step that was closed, and the contents of the round;
--                                                          staleness is "" unless max_staleness > 0;
--                                                          total_weight is "" if all weights are 1
-- {'waiting', global_step, num_accumulated, ahead, grace_left_ms, total_weight, num_required, most, grace_ms,
--  buffered_bytes}                                         the taker is in the queue, with `ahead` others before it;
--                                                          grace_left_ms is "0" unless only the grace is missing; the
--                                                          others are what the take requires
-- {'unset'}                                                the record does not say what the take requires; the taker
--                                                          left the queue
-- {'overflow', global_step}                                the step can't grow; the taker left the queue
-- {'superseded', sequence}                                 the take is over: acknowledged, recovered or left
-- {'forgotten', now_ms}                                    the session is unknown and too old to be new
-- {'gone_back', sequence, takes, losses}                   the server has lost data that it had acknowledged: the
--                                                          handle knows of a later request of the session, of more
--                                                          rounds or of more losses than the record, or another
--                                                          handle has noticed a loss; losses is the record's count
--                                                          now. The taker left the queue
-- {'missing'}                                              there is no such accumulator
-- {'replaced'}                                             the accumulator was deleted and created again
-- {'corrupt', where, text}                                 a key or field holds what redisacc never writes; nothing
--                                                          changed

-- #include "read_record"
-- #include "granted_round"
-- #include "granted_text"
-- #include "round_weight"
-- #include "is_enough_weight"
-- #include "drop_expired_takers"
-- #include "session_entry"
-- #include "extend_leases"
-- #include "announce"
-- #include "even_when_full"
-- #bind

-- The largest count that the record can hold.
local MOST = 999999999999999

-- Leaves the queue. Returns whether the taker was in it.
local function leave_queue()
  local was_queued = redis.call('ZREM', keys.queue, args.token) == 1
  redis.call('HDEL', keys.takers, args.token)
  return was_queued
end

-- Returns the reply to a take that has noticed that the accumulator has gone back to older data.
local function gone_back(record, entry)
  -- A handle that knows of nothing later than the record cannot notice that by itself, so the first one that does notes
  -- it for all others, once.
  if record.losses <= args.losses then
    record.losses = args.losses + 1
    redis.call('HSET', keys.record, 'losses', count_text(record.losses))
  end
  -- The take continues with another token, and must not wait behind this one.
  if leave_queue() then
    announce(keys.record, 'left', 'left')
  end
  return {'gone_back', count_text(entry and entry.sequence or 0), count_text(record.takes), count_text(record.losses)}
end

-- Returns what the take requires: a table with num_required, most and grace_ms; or nil and a refusal. The quorum is
-- read for each check, so a taker that waits follows a change.
local function requirement(record)
  if args.num_required > 0 then
    return {num_required = args.num_required, most = args.most, grace_ms = args.grace_ms}
  end
  -- #include "read_more"
  local refusal = read_more(keys.record, record, {'quorum', 'quorum_most', 'quorum_grace_ms'}, 3)
  if refusal then
    return nil, refusal
  elseif record.quorum == 0 and args.min_weight == 0 then
    if leave_queue() then
      announce(keys.record, 'left', 'left')
    end
    return nil, {'unset'}
  end
  local least = math.max(record.quorum, 1)
  local most = record.quorum_most > 0 and math.max(record.quorum_most, least) or MOST
  return {num_required = least, most = most, grace_ms = record.quorum_grace_ms}
end

-- Returns when the grace began; 0 if the round has not enough for it. The record stores when this round had
-- `grace_count` gradients and the weight `grace_weight`. If that was not noted, because no taker had asked for a grace
-- after as much, the grace begins now. A clock that was set back must not prolong it.
local function grace_beginning(record, required, now)
  local began = record.grace_began_ms
  if record.grace_count < required.num_required or required.grace_weight < args.min_weight or began == 0
    or began > now then
    return now
  end
  return began
end

-- Grants the round: renames its hashes, and begins the next one.
local function grant(record, entry, total_weight, now)
  if record.global_step == LAST_STEP then
    leave_queue()
    return {'overflow', record.global_step}
  end
  -- Reads come before writes: a key of another type raises here, while nothing has changed yet.
  local moves = {
    {keys.sums, keys.taken_sums, redis.call('HLEN', keys.sums)},
    {keys.buffered, keys.taken_buffered, redis.call('HLEN', keys.buffered)},
    {keys.inline, keys.taken_inline, redis.call('HLEN', keys.inline)},
    {keys.workers, keys.taken_workers, redis.call('HLEN', keys.workers)},
  }
  redis.call('HLEN', keys.takers)
  local staleness, weight = '', ''
  if record.max_staleness > 0 then
    -- #include "round_staleness"
    local refusal
    staleness, refusal = read_staleness(keys.record, record)
    if not staleness then
      return refusal
    elseif string.find(staleness, '[^%d:,]') then
      -- The entry of the taken round has spaces between its fields.
      return {'corrupt', 'staleness', string.sub(staleness, 1, 64)}
    end
  end
  if record.total_weight > 0 then
    -- #include "weight_text"
    weight = weight_text(total_weight)
  end
  -- No gradient is copied: only the keys of the round change their names.
  for _, move in ipairs(moves) do
    if move[3] > 0 then
      redis.call('RENAME', move[1], move[2])
    end
  end
  leave_queue()
  local count = count_text(record.num_accumulated)
  local reply = {'granted', record.global_step, count, record.round_shape, staleness, weight}
  redis.call('HSET', keys.taken, args.token, granted_text(reply, now, args.taker))
  entry = entry or {applied = 0, stale = 0}
  entry.sequence = args.sequence
  -- Every grant forgets idle sessions, so that the table also shrinks while no new session arrives.
  entry.new = true
  write_session(keys.sessions, args.session, entry, {'taken', record.global_step, count}, args.taker)
  extend_leases(record.lease_ms, keys.taken, keys.sessions)
  redis.call('HINCRBY', keys.record, 'global_step', 1)
  -- The step is read back as text, because HINCRBY's own reply has passed through a double.
  local step = redis.call('HGET', keys.record, 'global_step')
  redis.call('HSET', keys.record, 'num_accumulated', '0', 'round_shape', '', 'buffered_bytes', '0',
    'takes', count_text(record.takes + 1))
  if staleness ~= '' then
    redis.call('HDEL', keys.record, 'staleness')
  end
  if record.total_weight > 0 then
    redis.call('HDEL', keys.record, 'total_weight')
  end
  if record.grace_began_ms > 0 then
    redis.call('HDEL', keys.record, 'grace_began_ms')
  end
  local message = 'taken step=' .. step .. ' count=0 taken=' .. count .. ' taker=' .. args.taker
  -- Only a taker that is still in the queue has to wake up, and a reducer if it may have worked on this round.
  announce(keys.record, message, (moves[2][3] > 0 or redis.call('EXISTS', keys.queue) == 1) and message)
  return reply
end

local record, refusal = read_record(keys.record, args.incarnation,
  {'num_accumulated', 'lease_ms', 'takes', 'max_staleness', 'grace_count', 'grace_began_ms', 'losses'}, 4)
if not record then
  return refusal
end
local granted = granted_round(keys.taken, args.token)
if granted then
  return granted
end

even_when_full(keys.record)
local now = now_ms()
local ticket = redis.call('ZSCORE', keys.queue, args.token)
-- A late copy of a take that is over must get neither a round, which no taker would fetch, nor a place in the queue. A
-- taker that is already in the queue is not new, and may have waited for longer than sessions are remembered.
local entry
entry, refusal = read_session(keys.sessions, args.session)
if entry and args.sequence <= entry.sequence then
  return {'superseded', count_text(entry.sequence)}
elseif not entry and not (ticket and refusal[1] == 'forgotten') then
  return refusal
elseif (entry and args.acknowledged > entry.sequence) or record.takes < args.takes
  or record.losses ~= args.losses then
  -- An earlier take may have been undone, so that its gradients are in this round, too.
  return gone_back(record, entry)
end
local required
required, refusal = requirement(record)
if not required then
  return refusal
end
local head = first_live_taker(keys.queue, keys.takers, args.token, now)
local total_weight = round_weight(record)
local is_enough = record.num_accumulated >= required.num_required
  and is_enough_weight(total_weight, args.min_weight)
local grace_began_ms, grace_left = 0, 0
required.has_grace = required.grace_ms > 0 and required.most > required.num_required
if required.has_grace then
  -- #include "optional_weight"
  required.grace_weight = optional_weight(keys.record, 'grace_weight')
  if is_enough then
    grace_began_ms = grace_beginning(record, required, now)
  end
  if record.num_accumulated < required.most then
    grace_left = grace_began_ms + required.grace_ms - now
  end
end
if is_enough and grace_left <= 0 and (not head or head == args.token) then
  return grant(record, entry, total_weight, now)
end

-- The taker waits.
-- #include "read_more"
-- #include "optional_weight"

-- Puts the taker into the queue, or renews its lease there.
local function hold_place(record, ticket, required, now)
  if not ticket then
    ticket = record.tickets + 1
    redis.call('HSET', keys.record, 'tickets', count_text(ticket))
    redis.call('ZADD', keys.queue, ticket, args.token)
    announce(keys.record, string.format('waiting step=%s count=%s num_required=%.0f taker=%s',
      record.global_step, count_text(record.num_accumulated), required.num_required, args.taker))
  end
  local weight = ''
  if args.min_weight > 0 then
    -- #include "weight_text"
    weight = '*' .. weight_text(args.min_weight)
  end
  redis.call('HSET', keys.takers, args.token, string.format('%.0f%s%s %.0f %s', required.num_required, weight,
    required.has_grace and string.format('..%.0f+%.0f', required.most, required.grace_ms) or '',
    now + args.lease_ms, args.taker))
  -- The queue expires with its last live taker, so that takers which die in it leave no keys behind.
  for _, key in ipairs({keys.queue, keys.takers}) do
    if redis.call('PTTL', key) < args.lease_ms then
      redis.call('PEXPIRE', key, args.lease_ms)
    end
  end
end

-- Stores a weight in a field that is absent if it is 0.
local function write_weight(name, weight, before)
  if weight > 0 and weight ~= before then
    -- #include "weight_text"
    redis.call('HSET', keys.record, name, weight_text(weight))
  elseif weight ~= before then
    redis.call('HDEL', keys.record, name)
  end
end

-- Notes in the record what wakes this taker, which is the first in the queue.
local function note_wanted(record, required, is_enough, grace_began_ms)
  -- The gradient that raises the count to this number, and the total weight to that one, wakes the taker.
  local wanted = is_enough and required.most or required.num_required
  if record.wanted ~= wanted then
    redis.call('HSET', keys.record, 'wanted', count_text(math.min(wanted, MOST)))
  end
  write_weight('wanted_weight', args.min_weight, optional_weight(keys.record, 'wanted_weight'))
  if required.has_grace and (record.grace_count ~= required.num_required
      or required.grace_weight ~= args.min_weight or record.grace_began_ms ~= grace_began_ms) then
    -- The number outlives the round, so that the time is also noted if the gradients of the next one precede its take.
    redis.call('HSET', keys.record, 'grace_count', count_text(math.min(required.num_required, MOST)),
      'grace_began_ms', count_text(grace_began_ms))
    write_weight('grace_weight', args.min_weight, required.grace_weight)
  end
end

refusal = read_more(keys.record, record, {'tickets', 'wanted', 'buffered_bytes'}, 0)
if refusal then
  return refusal
end
hold_place(record, ticket, required, now)
local weight = count_text(record.num_accumulated)
if record.total_weight > 0 then
  -- #include "weight_text"
  weight = weight_text(total_weight)
end
local ahead = redis.call('ZRANK', keys.queue, args.token)
if ahead == 0 then
  note_wanted(record, required, is_enough, grace_began_ms)
else
  grace_left = 0
end
return {'waiting', record.global_step, count_text(record.num_accumulated), ahead,
  count_text(is_enough and math.max(grace_left, 0) or 0), weight,
  count_text(math.min(required.num_required, MOST)), count_text(math.min(required.most, MOST)),
  count_text(math.min(required.grace_ms, MOST)), count_text(record.buffered_bytes)}
