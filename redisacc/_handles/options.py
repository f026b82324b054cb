"""The arguments that all kinds of accumulators have, and how they are checked."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from redisacc._data import validation
from redisacc._data.encodings import Encoding, checked_encoding
from redisacc._data.spec import AccumulatorSpec, Normalize, Order
from redisacc._data.weights import StalenessWeight, checked_normalize, checked_staleness_weight
from redisacc._format.partitions import MOST_PARTITIONS
from redisacc._format.staleness import MOST_STALENESS
from redisacc._text import shown
from redisacc.errors import InvalidArgumentError


@dataclass(frozen=True, kw_only=True)
class Options:
    """The arguments of a handle that do not depend on its kind. ``ConditionalAccumulatorBase`` describes each of them.

    A caller's values become valid by ``checked``. A handle keeps that result, and its pickle holds ``of_a_copy``.
    """

    shared_name: str | None
    name: str
    worker: str | None
    encoding: Encoding | None
    finite: bool
    in_place_limit: int | None
    buffer_limit: int | None
    once_per_worker: bool | None
    max_staleness: int | None
    staleness_weight: StalenessWeight | None
    normalize: Normalize | None
    order: Order | None
    partitions: int | Literal["auto"] | None
    create: bool
    min_replicas: int

    def checked(self, spec: AccumulatorSpec) -> Options:
        """Returns valid options for an accumulator: None instead of an empty ``shared_name``, and plain Python types.

        Raises:
            InvalidArgumentError: an argument is invalid, or does not fit the accumulator or the other arguments.
        """
        name = validation.text(self.name, "name", max_bytes=512)
        worker = None if self.worker is None else validation.text(self.worker, "worker", max_bytes=200)
        encoding = None if self.encoding is None else checked_encoding(self.encoding, spec.dtypes)
        finite = validation.flag(self.finite, "finite")
        in_place_limit = _integer(self.in_place_limit, "in_place_limit")
        buffer_limit = _integer(self.buffer_limit, "buffer_limit")
        once = None if self.once_per_worker is None else validation.flag(self.once_per_worker, "once_per_worker")
        max_staleness = _integer(self.max_staleness, "max_staleness", high=MOST_STALENESS)
        staleness_weight = None
        if self.staleness_weight is not None:
            staleness_weight = checked_staleness_weight(self.staleness_weight, max_staleness, can_weigh=spec.can_weigh)
        normalize = None if self.normalize is None else checked_normalize(self.normalize)
        order = None if self.order is None else checked_order(self.order)
        if order == "worker":
            if once is False:
                raise InvalidArgumentError(
                    "order='worker' cannot go together with once_per_worker=False: gradients of one worker would have "
                    "no order"
                )
            once = True
        partitions = checked_partitions(self.partitions)
        create = validation.flag(self.create, "create")
        shared_name = None
        if self.shared_name is not None and not (isinstance(self.shared_name, str) and not self.shared_name):
            shared_name = validation.text(self.shared_name, "shared_name", max_bytes=512)
        elif not create:
            raise InvalidArgumentError("create=False requires a shared_name: a private accumulator is always a new one")
        return Options(
            shared_name=shared_name,
            name=name,
            worker=worker,
            encoding=encoding,
            finite=finite,
            in_place_limit=in_place_limit,
            buffer_limit=buffer_limit,
            once_per_worker=once,
            max_staleness=max_staleness,
            staleness_weight=staleness_weight,
            normalize=normalize,
            order=order,
            partitions=partitions,
            create=create,
            min_replicas=validation.integer(self.min_replicas, "min_replicas", low=0, high=1000),
        )

    def of_a_copy(self) -> Options:
        """Returns the options with which a pickled handle opens the same accumulator again.

        What is decided at creation is left out: the accumulator has it.
        """
        return dataclasses.replace(
            self,
            buffer_limit=None,
            once_per_worker=None,
            max_staleness=None,
            staleness_weight=None,
            normalize=None,
            order=None,
            partitions=None,
            create=True,
        )


def checked_order(value: object) -> Order:
    """Returns the argument ``order`` of a handle.

    Raises:
        InvalidArgumentError: it is neither "arrival" nor "worker".
    """
    if isinstance(value, str) and value == "arrival":
        return "arrival"
    if isinstance(value, str) and value == "worker":
        return "worker"
    raise InvalidArgumentError(f"order must be 'arrival' or 'worker', not {shown(value)}")


def checked_partitions(value: object) -> int | Literal["auto"] | None:
    """Returns the argument ``partitions`` of a handle.

    Raises:
        InvalidArgumentError: it is invalid.
    """
    if value is None or (isinstance(value, str) and value == "auto"):
        return None if value is None else "auto"
    try:
        return validation.integer(value, "partitions", low=1, high=MOST_PARTITIONS)
    except InvalidArgumentError:
        raise InvalidArgumentError(
            f'partitions must be an integer from 1 to {MOST_PARTITIONS}, "auto" or None, not {shown(value)}'
        ) from None


def _integer(value: object, what: str, *, high: int = validation.INT64_MAX) -> int | None:
    return None if value is None else validation.integer(value, what, low=0, high=high)
