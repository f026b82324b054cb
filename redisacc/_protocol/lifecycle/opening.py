"""Opens an accumulator, or creates it."""

from __future__ import annotations

import logging
import secrets
from typing import Literal

from redisacc._clock import durations
from redisacc._data.spec import AccumulatorSpec
from redisacc._data.tree.structure import difference, parse_structure
from redisacc._data.weights import CONSTANT
from redisacc._format.keys import NAMES, Keys
from redisacc._format.partitions import automatic_partitions, choose_partitions
from redisacc._format.record import FORMAT
from redisacc._protocol.lifecycle.deletion import delete
from redisacc._protocol.lifecycle.similar_names import suggestion
from redisacc._protocol.scripts.accumulators import Scripts
from redisacc._protocol.scripts.opening import Deleting, Opened, Schema
from redisacc._redis.reply_errors import NotPermittedError
from redisacc._redis.transport import Transport
from redisacc._text import QUOTED, printable, shown
from redisacc.errors import CorruptDataError, InvalidArgumentError, NotFoundError

logger = logging.getLogger("redisacc")

# How many bytes the buffered gradients of a round may have together, unless the creator says otherwise.
BUFFER_LIMIT = 256 * 2**20
# The same if sums follow the workers' numbers: as many as a record can hold. A round then has one gradient of each
# worker, and compacting them would change their order.
BUFFER_LIMIT_BY_WORKER = 10**15 - 1


def open_accumulator(
    transport: Transport,
    keys: Keys,
    scripts: Scripts,
    spec: AccumulatorSpec,
    *,
    buffer_limit: int | None,
    once_per_worker: bool | None,
    max_staleness: int | None,
    staleness_weight: str | None,
    normalize: str | None,
    order: str | None,
    partitions: int | Literal["auto"] | None,
    lease_ms: int,
    create: bool,
    incarnation: str | None = None,
) -> Opened:
    """Opens or creates the accumulator with these keys.

    Args:
        transport: the way to the server.
        keys: the keys of the accumulator.
        scripts: not yet bound to an incarnation.
        spec: the specification that the caller expects.
        buffer_limit: bytes; None: as with an existing accumulator, and the default for a new one.
        once_per_worker: whether a round accepts one gradient of each worker only; None: as an existing accumulator
            does, and no for a new one.
        max_staleness: by how many steps a gradient may be late; None: as with an existing accumulator, and 0 for a new
            one.
        staleness_weight: how staleness changes weights, as text; None: as with an existing accumulator, and not at all
            for a new one.
        normalize: the divisor of means; None: as with an existing accumulator, and the weights for a new one.
        order: the order in which the gradients of a round are added; None: as with an existing accumulator, and the
            order of arrival for a new one.
        partitions: among how many slots the parts of its gradients are spread; "auto": as many as there are masters,
            if its gradients are large enough; None: as with an existing accumulator, and 1 for a new one.
        lease_ms: how long a private accumulator outlives its owner, in milliseconds; 0: it is shared, and stays.
        create: whether to create it if there is none.
        incarnation: the only one that is opened, and none is created. None: any.

    Raises:
        NotFoundError: there is none, and none was to be created, or it is another incarnation.
        InvalidArgumentError: it was created as something else.
    """
    schema = Schema(FORMAT, **spec.schema)
    default_limit = BUFFER_LIMIT_BY_WORKER if order == "worker" else BUFFER_LIMIT
    chosen = _partitions(transport, keys, spec, partitions) if create and incarnation is None else ()
    while True:
        try:
            opened = scripts.open(
                incarnation=secrets.token_hex(16),
                schema=schema,
                chunk=spec.chunk,
                lease_ms=lease_ms,
                buffer_limit=default_limit if buffer_limit is None else buffer_limit,
                once_per_worker=bool(once_per_worker),
                max_staleness=max_staleness or 0,
                staleness_weight=staleness_weight or CONSTANT,
                normalize=normalize or "weights",
                order=order or "arrival",
                partitions=chosen,
                create=create and incarnation is None,
            )
        except NotFoundError:
            if create:
                raise
            raise NotFoundError(
                f"there is no accumulator {shown(keys.name)}, and create=False forbids to create one"
                f"{suggestion(transport, keys.name)}"
            ) from None
        if isinstance(opened, Opened):
            break
        # Somebody is deleting it, or died while deleting it. Finishing their work twice does no harm.
        assert isinstance(opened, Deleting)
        delete(transport, keys, opened.incarnation)
    if incarnation not in (None, opened.incarnation):
        raise NotFoundError(
            f"accumulator {shown(keys.name)} was deleted and created again since this handle was pickled. Open it by "
            "name"
        )
    _check_schema(
        keys,
        opened,
        schema,
        buffer_limit=buffer_limit,
        once_per_worker=once_per_worker,
        max_staleness=max_staleness,
        staleness_weight=staleness_weight,
        normalize=normalize,
        order=order,
        partitions=partitions,
    )
    if not lease_ms:
        list_name(transport, keys.name)
    return opened


def _partitions(
    transport: Transport, keys: Keys, spec: AccumulatorSpec, wanted: int | Literal["auto"] | None
) -> tuple[int, ...]:
    """Returns the partitions that the accumulator gets if it is created now."""
    if wanted in (None, 1):
        return ()
    slot_map = transport.slot_map(timeout=durations.opening) if transport.cluster is not None else None
    number = automatic_partitions(spec.gradient_bytes, slot_map) if wanted == "auto" else wanted
    assert isinstance(number, int)
    return choose_partitions(keys.name, number, slot_map)


def _check_schema(
    keys: Keys,
    opened: Opened,
    wanted: Schema,
    *,
    buffer_limit: int | None,
    once_per_worker: bool | None,
    max_staleness: int | None,
    staleness_weight: str | None,
    normalize: str | None,
    order: str | None,
    partitions: int | Literal["auto"] | None,
) -> None:
    num_partitions = len(opened.partitions) or 1
    # Of two trees, the leaf in which they differ says more.
    is_tree = opened.schema.kind == wanted.kind == "tree"
    differences = [
        f"{what} is {there if isinstance(there, int) else printable(there, QUOTED)}, not {here}"
        for what, there, here in (
            ("kind", opened.schema.kind, wanted.kind),
            ("dtype", opened.schema.dtype, wanted.dtype),
            ("shape", opened.schema.shape, wanted.shape),
            ("reduction_type", opened.schema.reduction_type, wanted.reduction_type),
            ("mean.rows", opened.schema.sparse_mean, wanted.sparse_mean),
            ("mean.missing", opened.schema.missing, wanted.missing),
            ("limits.buffer", opened.buffer_limit, opened.buffer_limit if buffer_limit is None else buffer_limit),
            (
                "once_per_worker",
                opened.once_per_worker,
                opened.once_per_worker if once_per_worker is None else once_per_worker,
            ),
            ("staleness.most", opened.max_staleness, opened.max_staleness if max_staleness is None else max_staleness),
            ("staleness.weight", opened.staleness_weight, staleness_weight or opened.staleness_weight),
            ("mean.by", opened.normalize, normalize or opened.normalize),
            ("order", opened.order, order or opened.order),
            ("number of partitions", num_partitions, partitions if isinstance(partitions, int) else num_partitions),
        )
        if there != here and not (is_tree and what in ("dtype", "shape"))
    ]
    if is_tree and opened.schema.tree != wanted.tree:
        differences.append(_tree_difference(keys, opened.schema.tree, wanted.tree))
    if differences:
        raise InvalidArgumentError(
            f"accumulator {shown(keys.name)} was created as something else: its {'; its '.join(differences)}. "
            "Ask for the same, choose another name, or delete it with `redisacc rm`"
        )


def _tree_difference(keys: Keys, there: str, here: str) -> str:
    """Returns in which leaf or node, the first of them, two trees differ."""
    wanted = parse_structure(here)
    try:
        found = parse_structure(there)
    except ValueError as error:
        raise CorruptDataError(
            f"{keys.record}: tree holds what redisacc did not write: {printable(str(error), 300)}"
        ) from None
    first = difference(found, wanted)
    # Texts that differ describe trees that differ, because a structure has one text only.
    assert first is not None
    what = "leaf" if first.is_leaf else "node"
    return f"{what} {shown(first.path)} is {printable(first.first, QUOTED)}, not {printable(first.second, QUOTED)}"


def list_name(transport: Transport, name: str) -> None:
    """Adds a name to the set of all names."""
    try:
        # The list has a slot of its own in a cluster, so the script cannot write it. A server that is full would refuse
        # even to add a name that is there already.
        if not transport.call("SISMEMBER", NAMES, name):
            transport.call("SADD", NAMES, name)
    except NotPermittedError as error:
        # Only listings use the set of names.
        logger.debug("%s is not listed: %s", name, error)
