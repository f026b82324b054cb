"""Sixty rules of the package, each with a mutation that breaks it and the tests that notice: see run.py.

A rule says what the package promises. It outlives the code that keeps it: whoever moves that code moves the rule's
place along, and whoever moves or merges tests names the new ones. What kills a mutant should take a few seconds, and
name a file and words of its tests (-k) instead of single cases.

| field | what it is |
| --- | --- |
| promise | the rule, as a user would say it |
| file | where it is kept, in redisacc/ or lua/ |
| old | text that occurs exactly once in the file; may have several lines |
| new | what takes its place in the mutant |
| tests | arguments of pytest: the tests that fail then |
"""

from typing import NamedTuple


class Rule(NamedTuple):
    """One row of the table."""

    promise: str
    file: str
    old: str
    new: str
    tests: str


RULES = (
    # Scripts.
    Rule(
        "A request that is sent twice is executed once",
        "lua/include/begin_request.lua",
        "if request.sequence == entry.sequence then",
        "if request.sequence == -1 then",
        "tests/faults/test_every_fault.py -k 'broken and apply'",
    ),
    Rule(
        "A copy of an earlier request that arrives late changes nothing",
        "lua/include/begin_request.lua",
        "elseif request.sequence < entry.sequence then",
        "elseif request.sequence < 0 then",
        "tests/faults/test_every_fault.py -k 'late and apply'",
    ),
    Rule(
        "Once an interrupted request is settled as not counted, no copy of it can still be counted",
        "lua/resolve.lua",
        "write_session(keys.sessions, args.session, entry, reply, args.worker)",
        "",
        "tests/faults/test_every_fault.py -k 'interrupted and apply'",
    ),
    Rule(
        "The gradient that completes a round wakes the take that waits for it",
        "lua/include/admit.lua",
        "local wakes = count >= record.wanted",
        "local wakes = count > record.wanted",
        "tests/behaviour/test_takes.py -k wakes_the_take",
    ),
    Rule(
        "Takers are served in the order in which they came",
        "lua/take.lua",
        "if is_enough and grace_left <= 0 and (not head or head == args.token) then",
        "if is_enough and grace_left <= 0 then",
        "tests/conformance/test_replay.py -k 'named_cases and Takes'",
    ),
    Rule(
        "A take that is sent again gets the round that it was granted",
        "lua/take.lua",
        "local granted = granted_round(keys.taken, args.token)\nif granted then",
        "local granted = granted_round(keys.taken, args.token)\nif granted == 0 then",
        "tests/faults/test_every_fault.py -k 'late and take'",
    ),
    Rule(
        "A taker that starts again does not start the grace again",
        "lua/take.lua",
        "  return began\nend",
        "  return now\nend",
        "tests/behaviour/test_grace.py -k starts_again",
    ),
    Rule(
        "A taker notices that the server has gone back to data from before a round that it was granted",
        "lua/take.lua",
        "or record.takes < args.takes\n",
        "\n",
        "tests/failures/servers/test_data_that_went_back.py -k 'knows_of_the_rounds'",
    ),
    Rule(
        "A taker that dies stops holding up those behind it when its lease ends",
        "lua/include/drop_expired_takers.lua",
        "lease_end >= now",
        "lease_end >= 0",
        "tests/protocol/test_bounded_work.py -k dead_takers",
    ),
    Rule(
        "A round that its taker has begun to acknowledge is not handed out again",
        "lua/include/end_round.lua",
        "(string.gsub(round, '^%a+', 'acknowledged', 1))",
        "round",
        "tests/protocol/test_unfinished.py -k acknowledgement",
    ),
    Rule(
        "A round is recovered by one process only",
        "lua/recover.lua",
        "redis.call('HDEL', keys.taken, args.old)",
        "",
        "tests/behaviour/test_rounds.py -k recovered",
    ),
    Rule(
        "An accepted gradient in parts stays, however late its round is taken",
        "lua/include/written_parts.lua",
        "redis.call('PERSIST', part)",
        "",
        "tests/behaviour/test_rounds.py -k stays",
    ),
    Rule(
        "Buffered gradients use no more memory than their limit",
        "lua/include/room_in_round.lua",
        "if bytes > record.buffer_limit then",
        "if bytes > 2 * record.buffer_limit then",
        "tests/behaviour/test_compaction.py -k has_no_room",
    ),
    Rule(
        "A gradient whose parts somebody has begun to remove is not accepted",
        "lua/commit.lua",
        "if args.attempt ~= '' and not is_leased then",
        "if false then",
        "tests/behaviour/test_partitions.py -k swept",
    ),
    Rule(
        "A version of parameters follows the one that its publisher knew",
        "lua/include/refused_version.lua",
        "elseif version ~= request.previous then",
        "elseif version == '' then",
        "tests/faults/test_meanwhile.py -k others_publish",
    ),
    Rule(
        "A second publisher does not shorten the lease of the first",
        "lua/register_version.lua",
        "if redis.call('PTTL', keys.record) < expiry_ms then",
        "if expiry_ms > 0 then",
        "tests/behaviour/test_parameter_partitions.py -k shortens",
    ),
    Rule(
        "A lease that a living process extends is given to nobody else",
        "lua/hold_lease.lua",
        "and lease_end > now then",
        "and lease_end > now + 3600000 then",
        "tests/training/test_crew_leases.py -k second_chief",
    ),
    Rule(
        "A handle never touches another accumulator that was created under its name",
        "lua/include/read_record.lua",
        "if fields[1] ~= incarnation then",
        "if not fields[1] then",
        "tests/behaviour/test_shared_names.py -k earlier_incarnation",
    ),
    Rule(
        "A client that the server has forgotten is not counted twice",
        "lua/include/session_entry.lua",
        "if not born or now - born > UNKNOWN_MS then",
        "if not born then",
        "tests/protocol/test_forgotten_sessions.py -k forgotten_is_not_counted",
    ),
    Rule(
        "A sum that the server adds has the weights of its gradients",
        "lua/apply.lua",
        "if weight ~= 1 and not (label",
        "if weight ~= weight and not (label",
        "tests/behaviour/test_weights.py -k rounds_without_weights",
    ),
    # Applying.
    Rule(
        "If the server may have executed a request, its caller learns that the outcome is unknown",
        "redisacc/_protocol/applying/requests.py",
        "raise self._unknown(call, error) from error\n            except RedisAccError",
        "raise\n            except RedisAccError",
        "tests/failures/connections/test_unknown_outcome.py -k 'apply_without_reply'",
    ),
    Rule(
        "Compacting keeps the weights of gradients",
        "redisacc/_protocol/applying/gradient_writer.py",
        "round_sum.add(replace(gradient, factor=weight))",
        "round_sum.add(gradient)",
        "tests/behaviour/test_weights.py -k compacting",
    ),
    # Rounds and their sums.
    Rule(
        "A round that lacks a gradient is an error, and no mean of the others",
        "redisacc/_protocol/rounds/round_reader.py",
        "if round_sum.number != contents.number:",
        "return round_sum\n        if round_sum.number:",
        "tests/behaviour/test_weights.py -k forged_total",
    ),
    Rule(
        "A gradient is not returned if another process has recovered its round meanwhile",
        "redisacc/_protocol/rounds/granted_rounds.py",
        "            break\n            has_begun",
        "            pass\n            has_begun",
        "tests/behaviour/test_round_owner.py -k 'recovered_is_not_returned'",
    ),
    Rule(
        "What a taker has added up ahead is used only if it belongs to the round",
        "redisacc/_protocol/sums/cells.py",
        "if cell.summed != wanted[: len(cell.summed)]]",
        "if len(cell.summed) > len(wanted)]",
        "tests/unit/test_part_sums.py",
    ),
    Rule(
        "A reducer stores a sum when all of its gradients are in it",
        "redisacc/_protocol/sums/cells.py",
        "if len(cell.summed) != self._uploads.expected or",
        "if not cell.summed or",
        "tests/behaviour/test_reduction.py -k fetches_the_sum",
    ),
    # Leases.
    Rule(
        "A process that stood still for longer than its lease asks for it before it does anything",
        "redisacc/_protocol/leases/crew.py",
        "if self._lost_to is None and clock.now() >= self._sure_until:",
        "if self._lost_to is None and clock.now() < 0:",
        "tests/training/test_crew_leases.py -k after_a_pause",
    ),
    Rule(
        "A private accumulator lives as long as its owner, with all of its keys",
        "redisacc/_protocol/leases/private_leases.py",
        "fixed += of.hashes",
        "pass",
        "tests/protocol/test_unfinished.py -k private",
    ),
    # Waiting.
    Rule(
        "A wait that is interrupted leaves the queue",
        "redisacc/_protocol/waiting/wait.py",
        "            self.abandon()\n            if isinstance(error, NotFoundError)",
        "            if isinstance(error, NotFoundError)",
        "tests/event_loop/test_waiting.py -k leaves_nothing",
    ),
    Rule(
        "A wait outlives a restart of its server",
        "redisacc/_protocol/waiting/wait.py",
        "            self._note_outage(error)\n            return None",
        "            raise",
        "tests/failures/servers/test_parameter_outages.py -k stays_away",
    ),
    # Parts, events and opening.
    Rule(
        "Nothing counts as stored before every node has stored its parts",
        "redisacc/_protocol/parts/write.py",
        "if there != lengths[partition]:",
        "if not there:",
        "tests/behaviour/test_parameter_partitions.py -k has_not_stored",
    ),
    Rule(
        "A reader of events that is too slow learns that it has missed some",
        "redisacc/_protocol/lifecycle/events.py",
        "                heard.append(None)\n",
        "",
        "tests/behaviour/test_events.py -k slow_reader",
    ),
    # Parameters, and their updates by an optimizer.
    Rule(
        "Rows are published alone only on top of a version that the publisher has",
        "redisacc/_protocol/parameters/publisher.py",
        "{**wanted.changed} if last.version == self._callers else {}",
        "{**wanted.changed}",
        "tests/behaviour/test_parameter_machine.py -k random",
    ),
    Rule(
        "An optimizer counts its updates",
        "redisacc/_protocol/updates/committer.py",
        "before.updates + bool(of.divisor)\n",
        "before.updates\n",
        "tests/training/test_updates.py -k 'every_optimizer and amsgrad'",
    ),
    # Connections.
    Rule(
        "A server that has forgotten the scripts gets them again",
        "redisacc/_wire/transport.py",
        'replies[here].code == "NOSCRIPT":',
        'replies[here].code == "NOSUCH":',
        "tests/faults/test_every_fault.py -k 'flushed and apply'",
    ),
    Rule(
        "A server that is busy is waited for",
        "redisacc/_wire/faults.py",
        '    "BUSY": "is busy",\n',
        "",
        "tests/failures/servers/test_restart.py -k busy_server_is_waited",
    ),
    Rule(
        "When a slot moves in the middle of a batch, no command is sent twice",
        "redisacc/_wire/cluster.py",
        "            commands = commands[at:]\n",
        "",
        "tests/unit/test_cluster_routing.py -k goes_on",
    ),
    Rule(
        "A large command is sent whole, however little the kernel takes at once",
        "redisacc/_wire/sockets.py",
        "buffers[first] = memoryview(buffers[first])[sent:]",
        "pass",
        "tests/unit/test_fast_socket.py -k kernel",
    ),
    Rule(
        "A child has connections of its own",
        "redisacc/_wire/node.py",
        "if connection.pid == os.getpid() and",
        "if connection.pid and",
        "tests/behaviour/test_fork.py -k share_a_handle",
    ),
    # Formats and numbers.
    Rule(
        "A sum is added in the order of its gradients, whoever came first",
        "redisacc/_format/buffered.py",
        'buffered.sort(key=attrgetter("order"))',
        "pass",
        "tests/behaviour/test_order.py -k follows_the_numbers",
    ),
    Rule(
        "A gradient with a number that is not finite is refused, wherever the number is",
        "redisacc/_arrays/encodings.py",
        "range(0, flat.size, _CHECKED_AT_ONCE)",
        "range(0, flat.size, max(flat.size, 1))",
        "tests/behaviour/test_finite.py -k searched",
    ),
    # Training.
    Rule(
        "A worker applies its gradient again if the server has lost it",
        "redisacc/_training/worker.py",
        "            self._apply(given, step)\n",
        "            return\n",
        "tests/training/test_lost_data.py -k server_has_lost_is_applied",
    ),
    Rule(
        "With workers that come and go, a step waits for all who are there",
        "redisacc/_training/quorum.py",
        "self._crew.workers() | contributors_of_round(self._transport, Keys(self._name))",
        "self._crew.workers()",
        "tests/training/test_quorum_of_steps.py -k stands_in",
    ),
    Rule(
        "A new chief continues what living workers have, if the server has lost it",
        "redisacc/_training/reconciliation.py",
        "inquiry.wanted.step if view.has_asked and inquiry.wanted else None",
        "None",
        "tests/training/test_lost_data.py -k asks_the_workers",
    ),
    Rule(
        "A leader that may not have led all the time asks the workers before it restores what it has",
        "redisacc/_training/reconciliation.py",
        "view.has_led_throughout = self._lease.gaps == self._gaps",
        "view.has_led_throughout = True",
        "tests/training/test_reconciliation.py -k stood_still",
    ),
    Rule(
        "A checkpoint that could not be written is tried once more at the end",
        "redisacc/_training/checkpointer.py",
        "if not (self._is_due or self._has_failed):",
        "if not self._is_due:",
        "tests/training/test_checkpoints.py -k once_more",
    ),
    Rule(
        "The gradient of local steps has the mean weight of its steps",
        "redisacc/_training/local_steps.py",
        "math.fsum(self._weights) / len(self._weights)",
        "math.fsum(self._weights)",
        "tests/training/test_local_steps.py -k mean_weight",
    ),
    Rule(
        "A damaged checkpoint is passed over",
        "redisacc/_checkpoints/file.py",
        "if hashed.hexdigest() != metadata.get(HASH):",
        "if not metadata.get(HASH):",
        "tests/unit/test_checkpoint_files.py -k 'damaged_checkpoints or not_the_latest'",
    ),
    # Processes and servers.
    Rule(
        "A killed `redisacc run` leaves no process behind",
        "redisacc/tools/launch/member.py",
        "preexec_fn=lambda: self.tell(os.getpid())",
        "preexec_fn=lambda: None",
        "tests/launch/test_signals.py -k killed_runner_leaves --slow",
    ),
    Rule(
        "Hosts with other settings do not count among those of a training",
        "redisacc/tools/launch/hosts/agreement.py",
        "if host.terms == terms.text and host.role != JOINS]",
        "if host.role != JOINS]",
        "tests/unit/test_launch_agreement.py -k other_terms",
    ),
    Rule(
        "Two servers never write to one directory",
        "redisacc/embedded/data_directory.py",
        "fcntl.LOCK_EX | fcntl.LOCK_NB",
        "fcntl.LOCK_SH | fcntl.LOCK_NB",
        "tests/embedded/test_server_data.py -k 'directory_in_use'",
    ),
    # What operators and observers use.
    Rule(
        "Removing garbage removes nothing that has an owner by then",
        "lua/remove_orphans.lua",
        "and not is_owned(args.owners[n]) then",
        "then",
        "tests/cli/test_garbage.py -k checks_again",
    ),
    Rule(
        "A role may do nothing that it was not given",
        "redisacc/tools/admin/acl.py",
        "    if eval_:\n",
        "    if not eval_:\n",
        "tests/security/test_roles.py -k scripts_of_its_own",
    ),
    Rule(
        "A block that fails leaves its round to be recovered",
        "redisacc/_handles/base.py",
        "timeout, None)\n        yield taken.round\n        self._taker.acknowledge(taken, None)",
        "timeout, None)\n        self._taker.acknowledge(taken, None)\n        yield taken.round",
        "tests/behaviour/test_rounds.py -k block_that_fails",
    ),
    Rule(
        "A second cancellation does not keep a wait from leaving its queue",
        "redisacc/asyncio/_calls.py",
        "given_up_at = time.monotonic() + CLEAN_UP",
        "given_up_at = None",
        "tests/event_loop/test_waiting.py -k second_cancellation",
    ),
    Rule(
        "An optimizer does what torch's does, to the last bit",
        "redisacc/optim/algorithms.py",
        "np.add(g, np.multiply(buffer, momentum, out=b), out=a) if nesterov else buffer",
        "buffer",
        "tests/conformance/test_optimizers.py -k torchs_bits",
    ),
    Rule(
        "A deletion is asked for before it happens",
        "redisacc/tools/cli/changes.py",
        'confirm("Delete this for every process?")',
        "pass",
        "tests/cli/test_rm.py",
    ),
    Rule(
        "Without its token, the page shows nothing",
        "redisacc/tools/dashboard/access.py",
        "if hmac.compare_digest(given, self._token):",
        "if self._token:",
        "tests/dashboard/test_access.py -k without_it",
    ),
    Rule(
        "Times of a round that was not heard whole are not shown",
        "redisacc/tools/monitoring/rounds.py",
        "if taken.num_accumulated != number:",
        "if taken.num_accumulated > number:",
        "tests/unit/test_round_history.py -k not_heard",
    ),
    Rule(
        "The span of a take has links to those of its gradients, up to a limit",
        "redisacc/_telemetry/spans.py",
        "traces[:MOST_LINKS]",
        "traces[1:MOST_LINKS]",
        "tests/telemetry/test_spans.py -k links",
    ),
)
