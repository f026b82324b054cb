"""The gradients of a run: whether there are any, and those that a worker leaves out."""

from __future__ import annotations

from typing import Any

from redisacc._arrays.spec import AccumulatorSpec
from redisacc._arrays.weights import LEAST_WEIGHT
from redisacc._format.keys import DELETING, Keys, ParameterKeys
from redisacc._log import warn
from redisacc._text import shown
from redisacc._wire.transport import Transport
from redisacc.errors import InvalidArgumentError, NotFiniteError


def has_no_gradients(transport: Transport, shared_name: str, *, alone: bool = False) -> bool:
    """Returns whether there is no accumulator of this name, or only one that is being deleted.

    Args:
        transport: the way to the server.
        shared_name: the name.
        alone: whether there have to be parameters of this name, at the same moment.
    """
    (found,), (version,) = transport.pipeline(
        [
            ("HMGET", Keys(shared_name).record, "incarnation"),
            ("HMGET", ParameterKeys(shared_name).record, "version"),
        ]
    )
    return (found is None or found.startswith(DELETING.encode())) and not (alone and version is None)


def no_gradient(spec: AccumulatorSpec) -> tuple[Any, float]:
    """Returns a gradient, and its weight, that leave the mean of the others as it is.

    Raises:
        InvalidArgumentError: the leaves are integers, and each gradient counts for their mean.
    """
    nothing = spec.structure.build([None] * len(spec.leaves))
    if spec.can_weigh:
        return nothing, LEAST_WEIGHT
    if spec.reduction_type == "MEAN" and spec.missing == "zero":
        raise InvalidArgumentError(
            "a step cannot be skipped with a mean of integers, because each gradient has the weight 1 in it: use "
            'reduction_type="SUM", or mean=redisacc.Mean(missing="skip")'
        )
    return nothing, 1.0


def warn_of_skip(name: str, step: int, number: int, error: NotFiniteError) -> None:
    """Logs that a gradient was skipped. In a row of many, each is twice as far from the first as the one before.

    Args:
        name: the run.
        step: the step.
        number: how many gradients this worker has skipped for this reason.
        error: what is wrong with the gradient.
    """
    if number & (number - 1) == 0:
        warn(
            name,
            "step %d continues without this worker's gradient, because of NaN or an infinity in it%s; %d of its "
            "gradients so far %s left out",
            step,
            f", at {shown(error.path)}" if error.path else "",
            number,
            "was" if number == 1 else "were",
        )
