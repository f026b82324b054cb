"""Opens an accumulator, and assembles the parts of a handle on it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from redisacc._data.spec import AccumulatorSpec
from redisacc._data.weights import CONSTANT
from redisacc._format.keys import Keys
from redisacc._format.record import SETTINGS
from redisacc._handles.options import AccumulatorOptions, Limits
from redisacc._protocol.applying.applier import IN_PLACE_LIMIT, Applier
from redisacc._protocol.applying.gradient_writer import GradientWriter
from redisacc._protocol.applying.requests import Requests
from redisacc._protocol.leases import private_leases
from redisacc._protocol.lifecycle.opening import open_accumulator
from redisacc._protocol.rounds.current_round import RecordReader
from redisacc._protocol.rounds.take_wait import History
from redisacc._protocol.rounds.taker import Taker
from redisacc._protocol.scripts import OF_ACCUMULATORS, Scripts
from redisacc._protocol.sessions import SessionPool
from redisacc._protocol.waiting.lifetime import Lifetime
from redisacc._redis.connect import connect
from redisacc._redis.eviction import warn_if_evicting
from redisacc._redis.transport import Transport
from redisacc._telemetry.telemetry import Telemetry

# The result of a take: an array, IndexedSlices, or a tree of both.
G = TypeVar("G")


@dataclass(frozen=True)
class Parts(Generic[G]):
    """What a handle consists of.

    Attributes:
        transport: the way to the server.
        spec: what the accumulator was created as.
        keys: its keys, with its partitions.
        scripts: its scripts, bound to its incarnation.
        lifetime: of the handle.
        telemetry: observes its operations.
        records: reads the record.
        sessions: number its requests.
        requests: sends requests exactly once.
        applier: applies gradients.
        taker: takes rounds.
        lease_ms: how long a private accumulator outlives its owner, in milliseconds; 0 for a shared one.
    """

    transport: Transport
    spec: AccumulatorSpec
    keys: Keys
    scripts: Scripts
    lifetime: Lifetime
    telemetry: Telemetry
    records: RecordReader
    sessions: SessionPool
    requests: Requests
    applier: Applier
    taker: Taker[G]
    lease_ms: int


def assemble(
    spec: AccumulatorSpec, shared_name: str | None, options: AccumulatorOptions, incarnation: str | None = None
) -> Parts[Any]:
    """Opens the accumulator, or creates it, and returns the parts of a handle on it.

    Args:
        spec: what the caller expects the accumulator to be.
        shared_name: its name; None: a new private one.
        options: valid ones.
        incarnation: the only one that is opened, and none is created. None: any.

    Raises:
        NotFoundError: there is none, and none was to be created, or it is another incarnation.
        InvalidArgumentError: it was created as something else.
        ServerUnavailableError: no server answers.
        ServerError: this user may not do what the handle has to do.
    """
    transport = connect(options["redis"])
    is_private = shared_name is None
    min_replicas = options["min_replicas"]
    limits = options["limits"] or Limits()
    keys = Keys(shared_name or private_leases.new_name())
    opened = open_accumulator(
        transport,
        keys,
        spec,
        {field.name: field.chosen(options) for field in SETTINGS},
        partitions=options["partitions"],
        create=options["create"],
        lease_ms=private_leases.OWNER_LEASE_MS if is_private else 0,
        incarnation=incarnation,
    )
    warn_if_evicting(transport, keys.record)
    if min_replicas:
        # If this user may not run WAIT, or the server lacks it, raise now and not at the first gradient.
        transport.call("WAIT", 0, 1, beside=keys.record)
    keys = Keys(keys.name, opened.partitions)
    scripts = Scripts(transport, keys, OF_ACCUMULATORS, min_replicas=min_replicas, incarnation=opened.incarnation)
    spec = dataclasses.replace(
        spec,
        chunk=opened.chunk,
        normalize=opened.normalize,
        order=opened.order,
    )
    telemetry = Telemetry(spec.kind, keys.name, is_private=is_private, address=transport.address)
    lifetime = Lifetime(keys.name)
    sessions = SessionPool(opened.now_ms)
    requests = Requests(transport, scripts, sessions)
    in_place_limit = IN_PLACE_LIMIT if limits.in_place is None else limits.in_place
    applier = Applier(
        keys,
        scripts,
        spec,
        requests=requests,
        writer=GradientWriter(
            transport,
            keys,
            scripts,
            spec,
            telemetry,
            inline_bytes=limits.inline,
            min_replicas=min_replicas,
            lease_ms=opened.lease_ms,
        ),
        in_place_limit=in_place_limit if opened.can_add_in_place else 0,
        staleness_weighs=opened.staleness_weight != CONSTANT,
        min_replicas=min_replicas,
    )
    taker: Taker[Any] = Taker(
        transport,
        keys,
        scripts,
        spec,
        sessions=sessions,
        lifetime=lifetime,
        min_replicas=min_replicas,
        history=History(opened.takes, opened.losses),
    )
    records = RecordReader(transport, keys, opened.incarnation, lifetime)
    return Parts(
        transport,
        spec,
        keys,
        scripts,
        lifetime,
        telemetry,
        records,
        sessions,
        requests,
        applier,
        taker,
        opened.lease_ms,
    )
