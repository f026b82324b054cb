"""What processes have in common besides the parameters that are trained: frozen parameters, and buffers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

import torch

from redisacc._clock import durations
from redisacc._format.keys import REST
from redisacc._handles.parameters import Parameters
from redisacc._protocol.parameters.marks import whereabouts
from redisacc._training.training import Training
from redisacc.errors import NotFoundError
from redisacc.torch._state import as_array, write

Value = TypeVar("Value")

logger = logging.getLogger("redisacc")

# What is done, for log records.
LOOK, PUBLISH = "to look for frozen parameters and buffers", "to publish frozen parameters and buffers"


class Rest:
    """The frozen parameters and the buffers of a model, which worker 0 publishes and the others copy.

    Args:
        training: the run, which has patience with the server.
        redis: the way to the server.
        frozen: the frozen parameters, by name.
        buffers: the buffers, by name.
    """

    def __init__(
        self, training: Training, redis: object, frozen: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor]
    ) -> None:
        self._name, self._redis, self._patience = training.shared_name, redis, training._patience
        self._frozen, self._buffers = [
            {name: tensor for name, tensor in of.items() if tensor.numel()} for of in (frozen, buffers)
        ]
        self._published: Parameters | None = None
        # The step and the buffers that this process has published or read last.
        self._last: tuple[int, dict[str, Any]] | None = None
        if self:
            training.meanwhile = self._meanwhile

    def __bool__(self) -> bool:
        return bool(self._frozen or self._buffers)

    @property
    def step(self) -> int:
        """The step of what is published; -1: nothing is."""
        return self._patience.call(self._step, LOOK, in_steps=True) if self else -1

    def _step(self) -> int:
        found = None
        # The server may have lost it.
        with suppress(NotFoundError):
            found = self._handle.step()
        return -1 if found is None else found

    @property
    def _handle(self) -> Parameters:
        if self._published is None:
            self._published = Parameters(self._name + REST, redis=self._redis)
        return self._published

    def begin(self) -> None:
        """Publishes what a new run begins with, in place of what an earlier one may have left."""

        def publish() -> None:
            self._handle.delete()
            self.close()
            self._publish(0)

        if self:
            self._patience.call(publish, PUBLISH, in_steps=True)

    def publish(self, step: int) -> None:
        """Publishes the buffers of a step, unless a process has done that before it was started again."""

        def publish() -> None:
            if self._step() < step:
                self._publish(step)

        self._made(publish, PUBLISH)

    def _publish(self, step: int) -> None:
        self._last = step, {name: as_array(tensor).copy() for name, tensor in self._buffers.items()}
        self._restore()

    def _restore(self) -> None:
        """Publishes what this process has published or read last, unless it is there."""
        if self._last is not None and (there := self._step()) < self._last[0]:
            step, buffers = self._last
            frozen = {name: as_array(tensor) for name, tensor in self._frozen.items()}
            same: dict[str, Any] | None = {name: [] for name in frozen} if there >= 0 else None
            self._handle._publish({**frozen, **buffers}, step, same, None, False, restores=True)

    def _meanwhile(self) -> None:
        # Others may have deleted it.
        with suppress(NotFoundError):
            self._restore()

    def _made(self, attempt: Callable[[], Value], what: str) -> Value:
        """Returns the result of an attempt, which is made again until others have restored what the server has lost."""

        def made() -> Value:
            while True:
                handle = self._handle
                try:
                    return attempt()
                except NotFoundError:
                    found = whereabouts(handle._transport, handle._keys, handle._reader.incarnation)
                    if found == "deleted":
                        raise
                    if found == "replaced":
                        # Nobody had it any longer.
                        self.close()
                    handle._transport.waits.sleep(durations.look_every)

        return self._patience.call(made, what, in_steps=True)

    def read(self, step: int | None = None) -> None:
        """Copies what is published into the model.

        Args:
            step: blocks until it is of this step, or of a later one. None means whatever there is, if anything.
        """
        if not self:
            return

        def look() -> tuple[int, Any] | None:
            return self._handle.latest() if step is None else self._handle.wait(step - 1)

        found = None
        with suppress(NotFoundError):
            found = self._made(look, LOOK)
        if found is None:
            logger.warning(
                "%s: the server has lost the frozen parameters and buffers of this run, so they begin in this process "
                "as the program has made them",
                self._name,
            )
            return
        self._last = found[0], {name: found[1][name] for name in self._buffers}
        write({**self._frozen, **self._buffers}, found[1], self._name)

    def close(self) -> None:
        """Closes the handle."""
        handle, self._published = self._published, None
        if handle is not None:
            handle.close()
