"""What processes have in common besides the parameters that are trained: frozen parameters, and buffers."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from redisacc._format.keys import REST
from redisacc._handles.parameters import Parameters
from redisacc._training.training import Training
from redisacc.errors import NotFoundError
from redisacc.torch._state import as_array, write

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
        self._kept = tuple(frozen)
        self._tensors = {name: tensor for name, tensor in {**frozen, **buffers}.items() if tensor.numel()}
        self._published: Parameters | None = None

    def __bool__(self) -> bool:
        return bool(self._tensors)

    @property
    def step(self) -> int:
        """The step of what is published; -1: nothing is."""

        def look() -> int | None:
            return self._handle.step()

        found = self._patience.call(look, LOOK, in_steps=True) if self else None
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
            self._handle.publish(self._arrays(), 0)

        if self:
            self._patience.call(publish, PUBLISH, in_steps=True)

    def publish(self, step: int) -> None:
        """Publishes the buffers of a step, unless a process has done that before it was started again."""

        def publish() -> None:
            if self.step < step:
                changed: dict[str, Any] = {name: [] for name in self._kept if name in self._tensors}
                self._handle.publish(self._arrays(), step, changed=changed)

        self._patience.call(publish, PUBLISH, in_steps=True)

    def read(self, step: int | None = None) -> None:
        """Copies what is published into the model.

        Args:
            step: blocks until it is of this step, or of a later one. None means whatever there is, if anything.
        """
        if not self:
            return

        def look() -> tuple[int, Any] | None:
            return self._handle.latest() if step is None else self._handle.wait(step - 1)

        try:
            found = self._patience.call(look, LOOK, in_steps=True)
        except NotFoundError:
            found = None
        if found is None:
            logger.warning(
                "%s: the server has lost the frozen parameters and buffers of this run, so they begin in this process "
                "as the program has made them",
                self._name,
            )
            return
        write(self._tensors, found[1], self._name)

    def _arrays(self) -> dict[str, Any]:
        return {name: as_array(tensor) for name, tensor in self._tensors.items()}

    def close(self) -> None:
        """Closes the handle."""
        handle, self._published = self._published, None
        if handle is not None:
            handle.close()
