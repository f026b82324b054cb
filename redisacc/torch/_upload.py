"""Gradients that leave while the backward pass computes the others."""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, SupportsFloat

import numpy as np
import torch

from redisacc._arrays.slices import IndexedSlices
from redisacc._clock import clock
from redisacc._training.training import Training

logger = logging.getLogger("redisacc")

# If step() follows the first gradient of a backward pass within so many seconds, an early upload overlaps with nothing,
# and its wake-ups cost a sixth of a small step's processor time.
SHORT_PASS = 0.005


def dtype_name(tensor: torch.Tensor) -> str:
    """Returns the dtype of a tensor as numpy calls it."""
    return str(tensor.dtype).removeprefix("torch.")


def is_elsewhere(tensor: torch.Tensor) -> bool:
    """Returns whether the elements of a tensor are outside of host memory."""
    return str(tensor.device.type) != "cpu"


# Begins to copy a gradient to host memory, and returns the event that says when that is complete, None if it is.
Copy = Callable[[torch.Tensor, torch.Tensor], Any]


class Streams:
    """Copies gradients, those of a GPU on a stream of its own, so that nothing waits for them."""

    def __init__(self) -> None:
        self._of: dict[torch.device, Any] = {}

    def copy(self, gradient: torch.Tensor, memory: torch.Tensor) -> Any:
        """Begins to copy a gradient."""
        if not gradient.is_cuda:
            memory.copy_(gradient)
            return None
        stream = self._of.get(gradient.device)
        if stream is None:
            stream = self._of[gradient.device] = torch.cuda.Stream(gradient.device)
        stream.wait_stream(torch.cuda.current_stream(gradient.device))
        with torch.cuda.stream(stream):
            memory.copy_(gradient, non_blocking=True)
            event = stream.record_event()
        # Its memory must not be used for something else before that.
        gradient.record_stream(stream)
        return event


class Staging:
    """Copies gradients to host memory, pinned for those of a GPU, and hands them out when they are there."""

    def __init__(self, copy: Copy) -> None:
        self._copy = copy
        self._memory: dict[str, torch.Tensor] = {}
        # The copies that were begun, and what says that each is complete.
        self._begun: deque[tuple[str, torch.Tensor, Any]] = deque()

    def begin(self, name: str, gradient: torch.Tensor) -> None:
        """Begins to copy a gradient."""
        memory = self._memory.get(name)
        if memory is None:
            memory = torch.empty(gradient.shape, dtype=gradient.dtype, pin_memory=gradient.is_cuda)
            self._memory[name] = memory
        self._begun.append((name, memory, self._copy(gradient, memory)))

    def complete(self, *, wait: bool) -> Iterator[tuple[str, Any]]:
        """Yields the name and the array of each copy that is complete, in the order in which they were begun.

        Args:
            wait: whether to block until all are complete.
        """
        while self._begun:
            name, memory, event = self._begun[0]
            if event is not None and not event.query():
                if not wait:
                    return
                event.synchronize()
            self._begun.popleft()
            yield name, memory.numpy()

    def forget(self) -> None:
        """Drops the copies that were begun."""
        for _ in self.complete(wait=True):
            pass


class Gradients:
    """Sends the gradients of a model: each as soon as it is ready, or all of them at the end.

    A gradient that changes after it was sent makes what was sent worthless: it is abandoned, and ``commit`` sends
    everything. A program that does so once does it in each step, so nothing is sent early from then on. While
    backward passes on the CPU are short, ``commit`` sends everything as well.

    Args:
        training: the run.
        tensors: the parameters, by name.
        rows: the names of those whose gradients are rows.
        copy: begins to copy a gradient to host memory. None means on a stream for each GPU.
    """

    def __init__(
        self, training: Training, tensors: Mapping[str, torch.Tensor], rows: set[str], copy: Copy | None = None
    ) -> None:
        self._training = training
        self._tensors = tensors
        self._names = {tensor: name for name, tensor in tensors.items()}
        self._rows = rows
        self._staging = Staging(copy or Streams().copy)
        self._upload: Any = None
        # The gradients that were sent, with their versions.
        self._sent: dict[str, tuple[torch.Tensor, int]] = {}
        # A backward pass uses a thread for each device.
        self._lock = threading.Lock()
        self._streams = True
        # When the backward pass completed its first gradient; and the shortest time from there to step(), in seconds,
        # of recent passes: on a busy machine, some take longer than they compute.
        self._began: float | None = None
        self._shortest = math.inf
        self._has_warned = self._has_warned_of_reset = False
        # Whether a backward pass has computed gradients that no step has used.
        self.are_new = False
        # How many blocks forbid to send anything.
        self.holds = 0

    def note(self, tensor: torch.Tensor) -> None:
        """Sends the gradient of a parameter, which the backward pass has just completed."""
        with self._lock:
            try:
                self._note(tensor)
            except BaseException:
                # It ends the backward pass. If the program continues nevertheless, step() sends what there is.
                self._abandon()
                raise

    def _note(self, tensor: torch.Tensor) -> None:
        if not self._streams or self.holds:
            if self._upload is not None:
                self._give_up("a backward pass under no_sync() has changed them")
            return
        name, gradient = self._names[tensor], tensor.grad
        if gradient is None:
            return
        if self._began is None:
            self._began = clock.now()
        if self._shortest < SHORT_PASS and not is_elsewhere(gradient):
            return
        if name in self._sent:
            if self._sent[name][0] is gradient:
                self._give_up("a second backward pass has changed them. Accumulate all but the last under no_sync()")
                return
            # The model's gradients were reset, so a step was left out.
            self._abandon()
        if self._upload is None:
            self._upload = self._training.begin()
        self._sent[name] = gradient, gradient._version
        if is_elsewhere(gradient) and not gradient.is_sparse and name not in self._rows:
            self._staging.begin(name, gradient)
        else:
            self._upload.put(name, self._value(name))
        self._put_staged(wait=False)

    def _put_staged(self, *, wait: bool) -> None:
        for name, array in self._staging.complete(wait=wait):
            self._upload.put(name, array)

    def _value(self, name: str) -> Any:
        """Returns the gradient of a parameter as it travels; None if there is none."""
        gradient = self._tensors[name].grad
        if gradient is None or gradient.is_sparse == (name in self._rows):
            return gradient
        if gradient.is_sparse:
            return gradient.to_dense()
        # A dense gradient of a table has all rows, for example if another module uses it as well.
        return IndexedSlices(gradient.numpy(force=True), np.arange(len(gradient)), tuple(gradient.shape))

    def _give_up(self, why: str) -> None:
        logger.warning(
            "%s: the backward pass sends gradients, but %s. From now on, step() sends all of them",
            self._training.shared_name,
            why,
        )
        self._streams = False
        self._abandon()

    def warn_if_new(self, step: int) -> None:
        """Warns once if the program resets gradients of a step that no step has used."""
        if self.are_new and not self._has_warned_of_reset:
            self._has_warned_of_reset = True
            logger.warning(
                "%s: zero_grad() drops the gradients of step %d, which no step() has used, so the others still wait "
                "for this process. If this batch is to be left out, call skip() instead",
                self._training.shared_name,
                step,
            )
        self.are_new = False

    def abandon(self) -> None:
        """Drops what was sent for this step."""
        with self._lock:
            self._abandon()

    def _abandon(self) -> None:
        upload, self._upload, self._began = self._upload, None, None
        self._sent.clear()
        self._staging.forget()
        if upload is not None:
            upload.abandon()

    def commit(self, weight: float, metrics: Mapping[str, SupportsFloat], others: Mapping[str, Any] = {}) -> None:
        """Applies the gradients: what was sent, and the rest, with other leaves."""
        with self._lock:
            if self._began is not None:
                self._shortest = min(clock.now() - self._began, 1.1 * self._shortest)
                self._began = None
            if self._upload is not None and not self._is_as_sent():
                self._give_up(
                    "the program has changed them since. Instead of clipping them, give clip_norm=, or call the "
                    "optimizer's clip_grad_norm_() with fused=False"
                )
            if self._upload is None:
                values = {name: self._value(name) for name in self._tensors}
                if not self._has_warned and all(value is None for value in values.values()):
                    self._has_warned = True
                    logger.warning(
                        "%s: step() counts gradients of 0, because no parameter has one. Was backward() called, and "
                        "does the model still have the parameters that the optimizer was made with?",
                        self._training.shared_name,
                    )
                self._training.apply({**values, **others}, weight=weight, metrics=metrics)
                return
            try:
                self._put_staged(wait=True)
                for name in self._tensors.keys() - self._sent.keys():
                    self._upload.put(name, self._value(name))
                for name, value in others.items():
                    self._upload.put(name, value)
                self._upload.commit(weight=weight, metrics=metrics)
            finally:
                # If it has failed, the next call sends everything.
                self._abandon()

    def _is_as_sent(self) -> bool:
        for name, (gradient, version) in self._sent.items():
            if self._tensors[name].grad is not gradient or gradient._version != version:
                return False
        return True
