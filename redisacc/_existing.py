"""Opens an accumulator that exists, as what it was created as."""

from __future__ import annotations

from typing import Any

from redisacc._accumulator import ConditionalAccumulatorBase
from redisacc._dense import ConditionalAccumulator
from redisacc._info import Record
from redisacc._keys import Keys
from redisacc._link import PATIENCE, link_to
from redisacc._sparse import SparseConditionalAccumulator
from redisacc.errors import CorruptDataError

_KINDS: dict[str, type[ConditionalAccumulator | SparseConditionalAccumulator]] = {
    "dense": ConditionalAccumulator,
    "sparse": SparseConditionalAccumulator,
}


def open_existing(
    keys: Keys, *, redis: object, worker: str | None = None, patience: float = PATIENCE
) -> ConditionalAccumulatorBase[Any]:
    """A handle on the accumulator of these keys.

    Raises:
        AccumulatorNotFoundError: there is none.
    """
    record = Record(keys, link_to(redis).call(*Record.command(keys), patience=patience))
    kind = _KINDS.get(record.kind)
    if kind is None:
        raise CorruptDataError(f"{keys.record}: kind holds {record.kind!r:.100}, which redisacc doesn't write there")
    return kind(record.dtype, record.shape, keys.name, reduction_type=record.reduction_type, redis=redis, worker=worker)
