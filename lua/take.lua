-- Takes the current round if enough gradients have come and nobody stands before this taker; else queues the taker,
-- or renews its lease in the queue. Moves no gradient: the round's keys are renamed.
--
-- KEYS[1] redisacc:{NAME}                       the record
-- KEYS[2] redisacc:{NAME}:sums                  index -> packed count and sum
-- KEYS[3] redisacc:{NAME}:parked                gradient id -> "order header"
-- KEYS[4] redisacc:{NAME}:small                 gradient id -> data of a small one
-- KEYS[5] redisacc:{NAME}:workers               worker -> gradients in this round
-- KEYS[6] redisacc:{NAME}:queue                 sorted set of tokens by ticket number
-- KEYS[7] redisacc:{NAME}:takers                token -> "num_required lease_end_ms taker"
-- KEYS[8] redisacc:{NAME}:taken                 token -> the round that was granted to it
-- KEYS[9] redisacc:{NAME}:taken:TOKEN:sums      the hashes of the granted round
-- KEYS[10] redisacc:{NAME}:taken:TOKEN:parked
-- KEYS[11] redisacc:{NAME}:taken:TOKEN:small
-- KEYS[12] redisacc:{NAME}:taken:TOKEN:workers
-- KEYS[13] redisacc:{NAME}:clients              client -> last request and totals
-- ARGV[1] incarnation                           the one that the handle opened
-- ARGV[2] token                                 random id of this take; the same again gets the same round
-- ARGV[3] num_required                          granted when num_accumulated >= num_required; at least 1
-- ARGV[4] lease_ms                              the taker leaves the queue unless it asks again within this time
-- ARGV[5] taker                                 name of who asks
-- ARGV[6] client                                id of the sender
-- ARGV[7] sequence                              "number 0": number of the take, growing for each client
--
-- Replies:
-- {'granted', global_step, num_accumulated, round_shape}   the step that was closed, and what the round holds
-- {'waiting', global_step, num_accumulated, ahead}         in the queue behind `ahead` others
-- {'overflow', global_step}                                the step can't grow; nothing changed
-- {'superseded', sequence}                                 the take is over: acknowledged, recovered or left
-- {'forgotten', now_ms}                                    this client is unknown, and too old to be new
-- {'lost', sequence}                                       never: a take doesn't say what its client knows
-- {'missing'}                                              no such accumulator
-- {'replaced'}                                             it was deleted and created anew
-- {'corrupt', where, text}                                 something under our keys isn't ours; nothing changed

-- #include "read_record"
-- #include "granted_round"
-- #include "client_entry"
-- #include "keep"
-- #include "announce"
-- #include "even_when_full"

local record_key, sums, parked, small, workers, queue, takers, taken = unpack(KEYS, 1, 8)
local taken_sums, taken_parked, taken_small, taken_workers, clients = KEYS[9], KEYS[10], KEYS[11], KEYS[12], KEYS[13]
local incarnation, token, num_required, lease_ms, taker, client, sequence =
  ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), ARGV[5], ARGV[6], ARGV[7]

-- So many dead takers are passed over in one call; more wait for the next.
local SWEEP = 100

local record, refusal = read_record(record_key, incarnation,
  {'num_accumulated', 'lease_ms', 'takes', 'tickets', 'wanted'})
if not record then
  return refusal
end
local reply = granted_round(taken, token)
if reply then
  return reply
end

even_when_full(record_key)
local now = now_ms()
local ticket = redis.call('ZSCORE', queue, token)
-- A copy that was kept back somewhere until its take was over must neither take a round, which nobody would fetch, nor
-- a place in the queue. Who stands in it already is not new, and may have waited for longer than clients are known.
local entry, over, repeated = read_client(clients, client, sequence)
if repeated then
  return {'superseded', (string.match(sequence, '^%d+'))}
elseif not entry and not (ticket and over[1] == 'forgotten') then
  return over
end
local head
for _ = 1, SWEEP do
  head = redis.call('ZRANGE', queue, 0, 0)[1]
  if not head or head == token then
    break
  end
  local lease_end = parse_count(string.match(redis.call('HGET', takers, head) or '', '^%d+ (%d+) '))
  if lease_end and lease_end >= now then
    break
  end
  redis.call('ZREM', queue, head)
  redis.call('HDEL', takers, head)
end

if record.num_accumulated >= num_required and (not head or head == token) then
  if record.global_step == LAST_STEP then
    redis.call('ZREM', queue, token)
    redis.call('HDEL', takers, token)
    return {'overflow', record.global_step}
  end
  -- Reads before writes: a key of another type raises here, while nothing has changed yet.
  local held = {
    {sums, taken_sums, redis.call('HLEN', sums)},
    {parked, taken_parked, redis.call('HLEN', parked)},
    {small, taken_small, redis.call('HLEN', small)},
    {workers, taken_workers, redis.call('HLEN', workers)},
  }
  redis.call('HLEN', takers)
  for _, move in ipairs(held) do
    if move[3] > 0 then
      redis.call('RENAME', move[1], move[2])
    end
  end
  redis.call('ZREM', queue, token)
  redis.call('HDEL', takers, token)
  local count = count_text(record.num_accumulated)
  redis.call('HSET', taken, token, string.format('granted %s %s %.0f %s %s',
    record.global_step, count, now, record.round_shape, taker))
  entry = entry or {sequence = tonumber(string.match(sequence, '^%d+')), applied = 0, stale = 0}
  -- The table shrinks again with every round, also where nobody new comes any more.
  entry.new = true
  write_client(clients, client, entry, {'taken', record.global_step, count}, taker)
  keep(record.lease_ms, taken, clients)
  redis.call('HINCRBY', record_key, 'global_step', 1)
  -- Read back as text: HINCRBY's own reply has gone through a double.
  local step = redis.call('HGET', record_key, 'global_step')
  redis.call('HSET', record_key, 'num_accumulated', '0', 'round_shape', '', 'parked_bytes', '0',
    'takes', count_text(record.takes + 1))
  -- Only who stands behind is to be woken.
  local said = string.format('taken step=%s count=0 taken=%s taker=%s', step, count, taker)
  announce(record_key, said, redis.call('EXISTS', queue) == 1 and said)
  return {'granted', record.global_step, count, record.round_shape}
end

if not ticket then
  ticket = record.tickets + 1
  redis.call('HSET', record_key, 'tickets', count_text(ticket))
  redis.call('ZADD', queue, ticket, token)
  announce(record_key, string.format('waiting step=%s count=%s num_required=%.0f taker=%s',
    record.global_step, count_text(record.num_accumulated), num_required, taker))
end
redis.call('HSET', takers, token, string.format('%.0f %.0f %s', num_required, now + lease_ms, taker))
-- With the last live taker the whole queue goes: whoever dies in it leaves nothing behind.
for _, key in ipairs({queue, takers}) do
  if redis.call('PTTL', key) < lease_ms then
    redis.call('PEXPIRE', key, lease_ms)
  end
end
local ahead = redis.call('ZRANK', queue, token)
if ahead == 0 and record.wanted ~= num_required then
  -- Who applies the gradient that makes it so many wakes this taker.
  redis.call('HSET', record_key, 'wanted', count_text(math.min(num_required, 999999999999999)))
end
return {'waiting', record.global_step, count_text(record.num_accumulated), ahead}
