"""Opens an existing accumulator with the schema that it was created with."""

from __future__ import annotations

from typing import Any

from redisacc._data.encodings import Encoding
from redisacc._data.spec import ArraySpec
from redisacc._data.tree.spec import TreeSpec
from redisacc._format.keys import Keys
from redisacc._format.record import Record
from redisacc._handles.base import ConditionalAccumulatorBase
from redisacc._handles.dense import ConditionalAccumulator
from redisacc._handles.options import AccumulatorOptions, Mean
from redisacc._handles.sparse import SparseConditionalAccumulator
from redisacc._handles.tree import TreeAccumulator
from redisacc._redis.connect import connect


def open_existing(
    keys: Keys, *, redis: object, worker: str | None = None, encoding: Encoding | None = None, finite: bool = False
) -> ConditionalAccumulatorBase[Any]:
    """Opens the accumulator of these keys, and returns a handle on it.

    Args:
        keys: the keys of the accumulator.
        redis: a client of redis-py or valkey-py, a URL, or None, as for ``ConditionalAccumulator``.
        worker: the name under which gradients of the handle are counted. None: "host:pid".
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
    spec = Record(keys, reply).spec(tree)
    reduction = spec.reduction_type
    options: AccumulatorOptions = {
        "redis": redis,
        "worker": worker,
        "encoding": encoding,
        "finite": finite,
        # If the server loses it now, it must not come back with other settings.
        "create": False,
    }
    if isinstance(spec, TreeSpec):
        options["mean"] = Mean(rows=spec.sparse_mean, missing=spec.missing)
        return TreeAccumulator(spec.tree, keys.name, reduction_type=reduction, **options)
    assert isinstance(spec, ArraySpec)
    schema = (spec.dtype.name, spec.shape, keys.name)
    if spec.kind == "sparse":
        options["mean"] = Mean(rows=spec.sparse_mean)
        return SparseConditionalAccumulator(*schema, reduction_type=reduction, **options)
    return ConditionalAccumulator(*schema, reduction_type=reduction, **options)
