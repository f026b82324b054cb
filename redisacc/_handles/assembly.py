"""Opens an accumulator, and assembles the parts of a handle on it."""

from __future__ import annotations

from dataclasses import replace
from typing import Generic, TypeVar

from redisacc._arrays.spec import AccumulatorSpec
from redisacc._arrays.weights import CONSTANT
from redisacc._format.buffered import INLINE_BYTES
from redisacc._format.keys import Keys
from redisacc._format.record import SETTINGS
from redisacc._handles.options import AccumulatorOptions, Limits
from redisacc._protocol.applying.applier import IN_PLACE_LIMIT, Applier
from redisacc._protocol.applying.attempts import Way
from redisacc._protocol.applying.requests import Requests
from redisacc._protocol.leases import private_leases
from redisacc._protocol.lifecycle.opening import open_accumulator
from redisacc._protocol.rounds.current_round import RecordReader
from redisacc._protocol.rounds.take_wait import History
from redisacc._protocol.rounds.taker import Taker
from redisacc._protocol.scripts import OF_ACCUMULATORS, Scripts
from redisacc._protocol.sessions import SessionPool
from redisacc._protocol.waiting.lifetime import Lifetime
from redisacc._telemetry.telemetry import Telemetry
from redisacc._wire.connect import connect, warn_if_evicting

# The result of a take: an array, IndexedSlices, or a tree of both.
G = TypeVar("G")


class Assembled(Generic[G]):
    """What a handle on an accumulator consists of.

    - ``_transport``: the way to the server.
    - ``_spec``: what the accumulator was created as.
    - ``_keys``: its keys, with its partitions.
    - ``_scripts``: its scripts, bound to its incarnation.
    - ``_lifetime``: of the handle.
    - ``_telemetry``: observes its operations.
    - ``_records``: reads the record.
    - ``_requests``: sends requests exactly once.
    - ``_applier``: applies gradients.
    - ``_taker``: takes rounds.
    """

    _taker: Taker[G]

    def _assemble(
        self,
        spec: AccumulatorSpec,
        shared_name: str | None,
        options: AccumulatorOptions,
        incarnation: str | None = None,
    ) -> int:
        """Opens the accumulator, or creates it, and makes the parts.

        Args:
            spec: what the caller expects the accumulator to be.
            shared_name: its name; None means a new private one.
            options: valid ones.
            incarnation: the only one that is opened, and none is created. None means any.

        Returns:
            How long a private accumulator outlives its owner, in milliseconds; 0 for a shared one.

        Raises:
            NotFoundError: there is none, and none was to be created, or it is another incarnation.
            InvalidArgumentError: it was created as something else.
            ServerUnavailableError: no server answers.
            ServerError: this user may not do what the handle has to do.
        """
        self._transport = transport = connect(options["redis"])
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
        self._keys = keys = Keys(keys.name, opened.partitions)
        self._scripts = scripts = Scripts(
            transport, keys, OF_ACCUMULATORS, min_replicas=min_replicas, incarnation=opened.incarnation
        )
        self._spec = spec = replace(spec, chunk=opened.chunk, normalize=opened.normalize, order=opened.order)
        self._telemetry = Telemetry(spec.kind, keys.name, is_private=is_private, address=transport.address)
        self._lifetime = Lifetime(keys.name)
        sessions = SessionPool(opened.now_ms)
        self._requests = Requests(transport, scripts, sessions)
        in_place_limit = IN_PLACE_LIMIT if limits.in_place is None else limits.in_place
        way = Way(
            transport,
            keys,
            scripts,
            spec,
            self._telemetry,
            inline_bytes=INLINE_BYTES if limits.inline is None else limits.inline,
            min_replicas=min_replicas,
            lease_ms=opened.lease_ms,
        )
        self._applier = Applier(
            way,
            self._requests,
            in_place_limit=in_place_limit if opened.can_add_in_place else 0,
            staleness_weighs=opened.staleness_weight != CONSTANT,
        )
        self._taker = Taker(
            transport,
            keys,
            scripts,
            spec,
            sessions=sessions,
            lifetime=self._lifetime,
            min_replicas=min_replicas,
            history=History(opened.takes, opened.losses),
        )
        self._records = RecordReader(transport, keys, opened.incarnation, self._lifetime)
        lease_ms: int = opened.lease_ms
        return lease_ms
