"""Deletes a training, as ``Chief.delete`` does, for processes that are not its chief."""

from __future__ import annotations

import contextlib

from redisacc._format.keys import Keys
from redisacc._handles.existing import open_existing
from redisacc._handles.parameters import Parameters
from redisacc.errors import NotFoundError


def delete_training(name: str, *, redis: object) -> None:
    """Deletes the gradients and the parameters of a training, for everybody, as far as they exist.

    Args:
        name: the name of the training.
        redis: a client of redis-py or valkey-py, a URL, or None, as for ``ConditionalAccumulator``.

    Raises:
        ServerUnavailableError: no server answers.
    """
    with contextlib.suppress(NotFoundError):
        open_existing(Keys(name), redis=redis).delete()
    with contextlib.suppress(NotFoundError), Parameters(name, redis=redis, create=False) as parameters:
        parameters.delete()
