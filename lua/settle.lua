-- Says what became of a request whose reply was lost, and where it has not been executed, sees to it that no copy of
-- it which is still on its way ever will be.
--
-- KEYS[1] redisacc:{NAME}             the record
-- KEYS[2] redisacc:{NAME}:clients     client -> last request and totals
-- ARGV[1] incarnation                 the one that the handle opened
-- ARGV[2] client                      id of the sender
-- ARGV[3] sequence                    "number acknowledged", as the request carried it
-- ARGV[4] worker                      name of the sender
--
-- Replies:
-- {OUTCOME, global_step, num_accumulated}      what it was told at first: applied, stale, set, lowered; taken: a take
-- {'withdrawn', global_step, num_accumulated}  it was not executed, and never will be
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
-- #include "even_when_full"

local record_key, clients = KEYS[1], KEYS[2]
local incarnation, client, sequence, worker = ARGV[1], ARGV[2], ARGV[3], ARGV[4]

local record, refusal = read_record(record_key, incarnation, {'num_accumulated', 'lease_ms'})
if not record then
  return refusal
end
local entry
entry, refusal = read_client(clients, client, sequence)
if not entry then
  return refusal
end
even_when_full(record_key)
local reply = {'withdrawn', record.global_step, count_text(record.num_accumulated)}
write_client(clients, client, entry, reply, worker)
keep(record.lease_ms, clients)
return reply
