"""Everything that Redis holds about an accumulator but its gradients, read at one moment."""

from __future__ import annotations

import datetime
from dataclasses import dataclass, field, fields

from redisacc._arrays.metrics import parse_metrics
from redisacc._format.crew_entries import parse_crew
from redisacc._format.entries import (
    ReducerInfo,
    UnacknowledgedRound,
    WaitingTaker,
    WorkerInfo,
    WorkersByState,
    lease_commands,
    parse_known_workers,
    parse_leases,
    parse_taken,
    parse_waiting,
    parse_workers,
    workers_by_state,
)
from redisacc._format.history_entries import parse_history
from redisacc._format.keys import Keys, ParameterKeys
from redisacc._format.record import Record, RecordValues
from redisacc._format.stored_text import clock_ms, parsed, time_of
from redisacc._wire.scans import scan_command, scan_whole
from redisacc._wire.sockets import Command
from redisacc._wire.transport import Transport

# Maximum number of takers that are listed.
MOST = 1000


@dataclass(frozen=True)
class AccumulatorInfo(RecordValues):
    """An accumulator as it was at one moment.

    Example:
        >>> import redisacc
        >>> acc = redisacc.ConditionalAccumulator("float32", [2], worker="ann")
        >>> result = acc.apply_grad([1.0, 2.0])
        >>> info = acc.info()
        >>> info.num_accumulated, info.workers, info.expected, info.late, info.gone
        (1, {'ann': 1}, [], [], [])

    Attributes:
        name: its name in Redis: the shared name, or the generated one of a private accumulator.
        kind: "dense", "sparse" or "tree".
        dtype: the name of the element type. For a tree, the names for all its leaves, separated by commas.
        shape: the declared shape: None for an unknown rank, with None for each unknown dimension. None for a tree.
        num_leaves: how many leaves a tree has; None for another kind. ``TreeAccumulator.spec`` describes the leaves.
            They are not read for this, because the description of a large model has hundreds of kilobytes.
        reduction_type: "MEAN" or "SUM".
        sparse_mean: the divisor of the sum of a row for "MEAN": the number of gradients that held its "index", or of
            all gradients of the "round". Always "index" for a dense accumulator, where it has no meaning.
        missing: the divisor of the mean of a leaf that some gradients of the round lack: "zero" for the number
            of all gradients, "skip" for the number of gradients that have it. "zero" if the gradients are not trees.
        incarnation: a random id given at creation.
        global_step: the current step.
        num_accumulated: the number of gradients in the current round.
        round_shape: the shape of each dense gradient in the current round, or of each row of a sparse one; ``()`` for
            trees. None while the round is empty.
        applied: the number of gradients accepted since creation.
        stale: the number of gradients dropped because they were too stale.
        repeated: the number of gradients dropped because the round had one of their worker already.
        duplicates: the number of requests that arrived again and were recognized.
        takes: the number of rounds granted.
        buffered: the number of buffered gradients in the current round. Gradients that were compacted count as one.
        buffered_bytes: how many bytes they have.
        buffer_limit: how many bytes they may have.
        once_per_worker: whether a round accepts one gradient of each worker only.
        max_staleness: by how many steps ``local_step`` may be below the step for a gradient to be accepted.
        staleness: how stale the gradients of the current round were: number of steps → number of gradients.
        staleness_weight: factor applied to the weight of a stale gradient: "constant" (1), or "inverse_sqrt".
        normalize: the divisor of a mean: the sum of the "weights" of gradients, or their "count".
        order: the order in which the gradients of a round are added: of their "arrival", or of the numbers of their
            "worker".
        total_weight: the sum of the weights of the gradients in the current round; ``num_accumulated`` if all are 1.
        partitions: the numbers p of the slots ``{NAME/p}`` that hold the parts of gradients; empty if that is the slot
            of the accumulator itself.
        quorum: the quorum of a take without ``num_required``.
        workers: the contributors to the current round: worker's name → number of its gradients.
        waiting: takers in the queue, in order of arrival; the first 1000, if there are more.
        unacknowledged: rounds that were granted and are not yet acknowledged, oldest first.
        created_at: when it was created, by the server's clock.
        known_workers: all workers that have sent a gradient, and those that have a lease in the run of this name,
            by name. A worker that has been idle for an hour may have been forgotten.
        last_activity: when the last request arrived that counted a gradient, set the step or was granted a round.
        metrics: the mean of each metric of the gradients of the latest round that had any, as in ``Round.metrics``;
            empty if none had. A round is known here once it has been acknowledged.
        chief: the name of the process that leads the run of this name, "host:pid"; "" if none does.
        reducer: the reducer that works on it, or those that work on its partitions; None means none does.
        read_at: the time of the server's clock when all this was read.
    """

    buffered: int
    workers: dict[str, int]
    waiting: list[WaitingTaker]
    unacknowledged: list[UnacknowledgedRound]
    created_at: datetime.datetime
    known_workers: list[WorkerInfo]
    last_activity: datetime.datetime
    metrics: dict[str, float]
    chief: str
    reducer: ReducerInfo | None
    # Does not count in comparisons, so that the same state, read twice, compares equal.
    read_at: datetime.datetime = field(compare=False)

    @property
    def states(self) -> WorkersByState:
        """The workers by state: in the round, expected, late or gone."""
        return workers_by_state(self.known_workers, self.global_step, self.read_at)

    @property
    def expected(self) -> list[WorkerInfo]:
        """Workers without a gradient in the current round that are neither late nor gone.

        Here as in ``late`` and ``gone``, the one that was seen most recently comes first.
        """
        return self.states.expected

    @property
    def late(self) -> list[WorkerInfo]:
        """Workers without a gradient in the current round that others have waited for.

        Such a worker is not gone, and was last seen 5 seconds ago or earlier. Besides, a whole round was taken without
        it; or since the latest gradient of the current round, at least as much time has passed as between the last time
        that this worker was seen and that gradient.
        """
        return self.states.late

    @property
    def gone(self) -> list[WorkerInfo]:
        """Workers without a gradient in the current round that are not worth waiting for.

        The lease of a worker of a run has ended, or was given back. A worker without a lease was last seen 10
        minutes ago or longer. `redisacc set --forget` removes one from the list at once; the server forgets workers
        that were not seen for an hour, a few whenever another one sends its first gradient.
        """
        return self.states.gone


def summary_commands(keys: Keys) -> list[Command]:
    """Returns commands that cost little, and whose replies change with every gradient, take, taker and version.

    The first one reads the record, and the second one the version of the parameters of this name, and fields that a
    chief may change without a new version.
    """
    return [
        Record.command(keys),
        ("HMGET", ParameterKeys(keys.name).record, "version", "finished", "workers", "until"),
        ("ZRANGE", keys.queue, 0, 9, "WITHSCORES"),
        ("ZCARD", keys.queue),
        ("HLEN", keys.taken),
        ("HLEN", keys.sessions),
        scan_command(keys.crew),
        *lease_commands(keys),
    ]


def read_info(transport: Transport, keys: Keys) -> AccumulatorInfo:
    """Returns everything but the gradients.

    Raises:
        NotFoundError: there is no such accumulator.
        CorruptDataError: something under its keys is not as redisacc writes it.
    """
    parameters = ParameterKeys(keys.name)
    hashes = (keys.current.workers, keys.takers, keys.taken, keys.sessions, keys.crew)
    record, buffered, queue, [metrics], [latest], clock, *firsts = transport.pipeline(
        [
            Record.command(keys),
            ("HLEN", keys.current.buffered),
            ("ZRANGE", keys.queue, 0, MOST - 1),
            ("HMGET", keys.record, "metrics"),
            # Where reducers update the parameters, it is the script that publishes them that ends a round.
            ("HMGET", parameters.record, "history_latest"),
            ("TIME",),
            *(scan_command(key) for key in hashes),
        ]
    )
    found = Record(keys, record)
    leases = transport.pipeline(lease_commands(Keys(keys.name, found.partitions)))
    workers, takers, taken, sessions, crew = (
        scan_whole(transport, key, first) for key, first in zip(hashes, firsts, strict=True)
    )
    # A taker that joined or left between the two reads is in only one of them.
    waiting = [parse_waiting(keys, token, takers[token]) for token in queue if token in takers]
    rounds = [parse_taken(keys, token, text) for token, text in taken.items()]
    in_round = parse_workers(workers, keys.current.workers)
    now_ms = clock_ms(clock)
    read_at = time_of(now_ms)
    members = parse_crew(keys.crew, crew, now_ms)
    known_workers, seen = parse_known_workers(keys, sessions, in_round, members, read_at)
    return AccumulatorInfo(
        **{value.name: getattr(found, value.name) for value in fields(RecordValues)},
        buffered=int(buffered),
        workers=in_round,
        waiting=waiting,
        unacknowledged=sorted((one for state, one in rounds if state == "granted"), key=lambda one: one.granted_at),
        created_at=found.created_ms,
        known_workers=known_workers,
        last_activity=max([found.created_ms, *seen, *(one.granted_at for _, one in rounds)]),
        metrics=parsed(keys.record, "metrics", metrics or b"", parse_metrics)
        if latest is None
        else parse_history(parameters.record, [latest], None)[0].metrics,
        chief=next((member.who for member in members if member.number is None and member.left > 0), ""),
        reducer=parse_leases(leases),
        read_at=read_at,
    )
