"""Opens an existing accumulator with the schema that it was created with."""

from __future__ import annotations

from typing import Any

from redisacc._arrays.encodings import Encoding
from redisacc._format.keys import Keys
from redisacc._format.record import Record
from redisacc._handles.base import ConditionalAccumulatorBase
from redisacc._handles.dense import ConditionalAccumulator
from redisacc._handles.options import AccumulatorOptions, checked_options
from redisacc._handles.sparse import SparseConditionalAccumulator
from redisacc._handles.tree import TreeAccumulator
from redisacc._wire.connect import connect

# The class of each kind, and the default name of its handles.
_KINDS: dict[str, tuple[type[ConditionalAccumulatorBase[Any]], str]] = {
    "dense": (ConditionalAccumulator, "conditional_accumulator"),
    "sparse": (SparseConditionalAccumulator, "sparse_conditional_accumulator"),
    "tree": (TreeAccumulator, "tree_accumulator"),
}


def open_existing(
    keys: Keys, *, redis: object, worker: str | None = None, encoding: Encoding | None = None, finite: bool = False
) -> ConditionalAccumulatorBase[Any]:
    """Opens the accumulator of these keys, and returns a handle on it.

    Args:
        keys: the keys of the accumulator.
        redis: a redis-py or valkey-py client, a URL, or None, as for ``ConditionalAccumulator``.
        worker: the name under which gradients of the handle are counted. None means "host:pid".
        encoding: how the elements of its gradients travel, as for ``ConditionalAccumulator``.
        finite: whether it refuses gradients with NaN or infinities.

    Raises:
        NotFoundError: there is no such accumulator.
        CorruptDataError: redisacc did not write its record.
    """
    # Held until the handle holds it, so that both use the same connections.
    transport = connect(redis)
    # In one command: between two, the server might lose it.
    *reply, tree = transport.call(*Record.command(keys), "tree")
    options: AccumulatorOptions = {
        "redis": redis,
        "worker": worker,
        "encoding": encoding,
        "finite": finite,
        # If the server loses it now, it must not come back with other settings.
        "create": False,
    }
    spec = Record(keys, reply).spec(tree)
    kind, name = _KINDS[spec.kind]
    handle = kind.__new__(kind)
    handle._open(spec, keys.name, name, checked_options(options, spec, kind.__name__))
    return handle
