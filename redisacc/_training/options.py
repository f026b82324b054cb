"""The options that the halves of a run share, stated once: their names and types."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

from redisacc._arrays.encodings import Encoding
from redisacc._arrays.spec import Order
from redisacc._format.quorum import Quorum
from redisacc._handles.options import Limits, Mean, check_names, group_of
from redisacc._text import shown
from redisacc.errors import InvalidArgumentError

SKIP: Literal["skip"] = "skip"

# What a worker does with a gradient that holds NaN or an infinity: see ``Worker``.
Finite = bool | Literal["skip"]


def checked_finite(value: object) -> Finite:
    """Returns the option ``finite`` of a worker.

    Raises:
        InvalidArgumentError: it is something else.
    """
    if isinstance(value, str) and value == SKIP:
        return SKIP
    if isinstance(value, bool):
        return value
    raise InvalidArgumentError(f"finite must be True, False or 'skip', not {shown(value)}")


@dataclass(frozen=True)
class Checkpoints:
    """Where a run writes checkpoints, how often, and how many are kept.

    Example:
        >>> import redisacc
        >>> redisacc.Checkpoints("saved", every=50, keep_every=10_000)
        Checkpoints(folder='saved', every=50, keep=3, keep_every=10000)

    Args:
        folder: the path of a folder, or an address that fsspec knows, such as "s3://bucket/folder". Each run needs its
            own.
        every: the number of steps between checkpoints, 1 or more; or a ``datetime.timedelta``. If later steps are
            published meanwhile, the checkpoint may be of a later step.
        keep: the number of latest checkpoints to keep, 1 or more.
        keep_every: also keeps the first checkpoint in each interval of this many steps, such as 10000. None means none.
    """

    folder: str | os.PathLike[str]
    every: int | datetime.timedelta = 100
    keep: int = 3
    keep_every: int | None = None


class GradientOptions(TypedDict, total=False):
    """What a run passes on to the accumulator of its gradients. ``Chief`` describes each of them."""

    sparse: Collection[str]
    finite: Finite
    reduction_type: str | None
    order: Order | None
    mean: Mean | None
    limits: Limits | None
    partitions: int | Literal["auto"] | None
    min_replicas: int


GROUPS: Mapping[str, type[Any]] = {"mean": Mean, "limits": Limits}


class LeaderOptions(TypedDict, total=False):
    """The options of a ``Chief``, which a ``Training`` has as well. ``Chief`` describes each of them."""

    quorum: int | Quorum | None
    checkpoint: str | os.PathLike[str] | Checkpoints | None
    redis: object
    patience: float | None
    accumulator: GradientOptions | None


class TrainingOptions(LeaderOptions, total=False):
    """The options of a ``Training``, which a ``redisacc.torch.Optimizer`` has as well."""

    encoding: Encoding | None
    log: Callable[[int, dict[str, float]], object] | None


def gradient_options(given: object) -> GradientOptions:
    """Returns the argument ``accumulator`` of a run.

    Raises:
        InvalidArgumentError: it is no dict.
        TypeError: there is no such option.
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise InvalidArgumentError(
            f"accumulator must be a dict of options, such as {{'finite': True}}, not {shown(given)}"
        )
    check_names(given, GradientOptions, "accumulator=dict")
    options: Any = dict(given)
    options |= {name: group_of(options[name], name, kind) for name, kind in GROUPS.items() if name in options}
    return options  # type: ignore[no-any-return]


def checkpoints(given: str | os.PathLike[str] | Checkpoints) -> Checkpoints:
    """Returns the argument ``checkpoint`` of a run."""
    return given if isinstance(given, Checkpoints) else Checkpoints(given)
