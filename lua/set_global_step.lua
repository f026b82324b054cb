-- Sets the global step. What has been accumulated stays.
--
-- KEYS[1] redisacc:{NAME}             the record
-- KEYS[2] redisacc:{NAME}:clients     client -> last request and totals
-- ARGV[1] incarnation                 the one that the handle opened
-- ARGV[2] client                      id of the sender
-- ARGV[3] sequence                    "number acknowledged": number of the request, growing for each client (the same
--                                     again changes nothing), and the last one of which the client knows the outcome
-- ARGV[4] worker                      name of the sender
-- ARGV[5] new_global_step             int64 as text
--
-- Replies:
-- {'set', global_step, num_accumulated}        done
-- {'lowered', global_step, num_accumulated}    done; the step was higher before
-- {'superseded', sequence}                     a later request of this client has been executed; nothing changed
-- {'forgotten', now_ms}                        this client is unknown, and too old to be new; nothing changed
-- {'lost', sequence}                           the client knows the outcome of a later request than this, the last one
--                                              that the server knows; nothing changed
-- {'missing'}                                  no such accumulator
-- {'replaced'}                                 it was deleted and created anew
-- {'corrupt', where, text}                     something under our keys isn't ours; nothing changed

-- #include "read_record"
-- #include "client_entry"
-- #include "keep"
-- #include "announce"
-- #include "even_when_full"

local record_key, clients = KEYS[1], KEYS[2]
local incarnation, client, sequence, worker, step = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]

local record, refusal = read_record(record_key, incarnation, {'num_accumulated', 'lease_ms'})
if not record then
  return refusal
end
local entry, repeated
entry, refusal, repeated = read_client(clients, client, sequence)
if not entry then
  if repeated then
    redis.call('HINCRBY', record_key, 'duplicates', 1)
  end
  return refusal
end

local reply = {
  integer_text_less(step, record.global_step) and 'lowered' or 'set', step, count_text(record.num_accumulated),
}
even_when_full(record_key)
redis.call('HSET', record_key, 'global_step', step)
write_client(clients, client, entry, reply, worker)
keep(record.lease_ms, clients)
announce(record_key, string.format('%s step=%s count=%s', reply[1], reply[2], reply[3]))
return reply
