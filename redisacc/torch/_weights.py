"""The parameters of a model that a run has, and what a program changes in them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from redisacc._text import shown
from redisacc.errors import InvalidArgumentError
from redisacc.torch._state import write

# How many elements of a tensor are compared, and how many tensors in each step. Torch does not count changes through
# ``.data``, so the bytes have to be read; a step must not pay for reading all of them.
ELEMENTS, TENSORS = 16_384, 8


class Sample(NamedTuple):
    """A copy of some elements of a tensor, by which a change is noticed that torch does not count.

    Attributes:
        begin: the place of the first of them.
        copy: their bytes.
    """

    begin: int
    copy: torch.Tensor

    @classmethod
    def of(cls, tensor: torch.Tensor, turn: int) -> Sample:
        """Takes a sample. Each turn takes other elements of a large tensor."""
        begin = turn * ELEMENTS % max(1, tensor.numel())
        return cls(begin, _bytes(tensor, begin).clone())

    def is_of(self, tensor: torch.Tensor) -> bool:
        """Returns whether the tensor still has these elements."""
        now = _bytes(tensor, self.begin)
        return now.device != self.copy.device or bool(torch.equal(now, self.copy))


def _bytes(tensor: torch.Tensor, begin: int) -> torch.Tensor:
    # Bytes, because NaN is not equal to itself.
    return tensor.detach().reshape(-1)[begin : begin + ELEMENTS].view(torch.uint8)


class Weights:
    """The parameters of a model that a run has. Notices that a program has changed some since they were last written.

    Torch counts changes in place, and all are noticed at once. Of changes through ``.data``, which it does not count,
    those of 8 parameters are noticed in each step, which take turns.

    Args:
        shared_name: the name of the run.
        tensors: those that are trained, by name.
        frozen: the others of the optimizer.
        is_shared: whether all processes have the same weights, so that a program must not change them.
    """

    def __init__(
        self,
        shared_name: str,
        tensors: Mapping[str, torch.Tensor],
        frozen: Mapping[str, torch.Tensor],
        *,
        is_shared: bool,
    ) -> None:
        self._shared_name, self._tensors, self._frozen = shared_name, tensors, frozen
        self._dtypes = {name: each.dtype for name, each in tensors.items()}
        self._is_shared = is_shared
        self._versions: dict[str, int] = {}
        self._samples: dict[str, Sample] = {}
        self._turn = 0

    def write(self, tree: Any) -> None:
        """Checks the weights of a version, and writes them into the parameters."""
        write(self._tensors, tree, self._shared_name)

    def note(self) -> None:
        """Notes that the parameters are as they should be."""
        if not self._is_shared:
            return
        names = [*self._tensors]
        self._versions = {name: tensor._version for name, tensor in self._tensors.items()}
        turns = range(self._turn, self._turn + min(TENSORS, len(names)))
        self._samples = {
            names[turn % len(names)]: Sample.of(self._tensors[names[turn % len(names)]], turn // len(names))
            for turn in turns
        }
        self._turn = turns.stop

    def changed(self) -> str | None:
        """Returns the name of a parameter that the program has changed since; None if there is none."""
        for name, version in self._versions.items():
            tensor = self._tensors[name]
            if tensor._version != version or (name in self._samples and not self._samples[name].is_of(tensor)):
                return name
        return None

    @contextmanager
    def rewriting(self) -> Iterator[list[str]]:
        """Notes what the block writes. Yields a list, which gets the names of the parameters that it changes."""
        before = {name: tensor.detach().clone() for name, tensor in self._tensors.items()}
        changed: list[str] = []
        yield changed
        self.note()
        changed += [name for name, tensor in self._tensors.items() if not torch.equal(before[name], tensor)]

    def check_dtypes(self) -> None:
        """Raises InvalidArgumentError if a parameter has another dtype than when the optimizer was wrapped."""
        for name, tensor in self._tensors.items():
            if tensor.dtype is not self._dtypes[name]:
                raise InvalidArgumentError(
                    f"parameter {shown(name)} is {tensor.dtype}, but was {self._dtypes[name]} when the optimizer was "
                    "wrapped: convert the model before that"
                )

    def check(self, *, may_freeze: bool) -> None:
        """Checks before a step that the program has done nothing to the parameters that it must not.

        Args:
            may_freeze: whether parameters may be frozen in the middle of a run.

        Raises:
            InvalidArgumentError: it has. The message names the first parameter.
        """
        for name, tensor in self._frozen.items():
            if tensor.grad is not None:
                raise InvalidArgumentError(
                    f"parameter {shown(name)} has a gradient, but required none when the optimizer was wrapped: call "
                    "requires_grad_() before that"
                )
        for name, tensor in self._tensors.items():
            if not may_freeze and not tensor.requires_grad:
                raise InvalidArgumentError(
                    f"parameter {shown(name)} no longer has requires_grad=True, but its update is made for all "
                    "processes: freeze layers before the optimizer is wrapped, or give fused=False"
                )
        self.check_dtypes()
        changed = self.changed()
        if changed is not None:
            raise InvalidArgumentError(
                f"parameter {shown(changed)} was changed after step() had written it, in this process alone. To train "
                "with other weights, call load_weights() in all processes, which publishes those of worker 0 as the "
                "next version. To limit weights, do that in the forward pass"
            )
