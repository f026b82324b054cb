"""Steps that a process makes alone, with torch's own optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from redisacc._text import shown
from redisacc._training.local_steps import InnerModel
from redisacc.errors import NotFiniteError


class TorchModel(InnerModel):
    """The weights of a model of torch, which an optimizer of torch moves where they are.

    Args:
        optimizer: the optimizer.
        tensors: its parameters, by name.
        write: checks the weights of a version, and writes them into the parameters.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, tensors: Mapping[str, torch.Tensor], write: Callable[[Any], object]
    ) -> None:
        self._optimizer = optimizer
        self._tensors = tensors
        self._write = write
        self._before: Mapping[str, Any] = {}

    @property
    def weights(self) -> Any:
        """The parameters themselves."""
        return self._tensors

    def set(self, weights: Any) -> None:
        """Writes the weights of a version into the parameters."""
        self._write(weights)
        self._before = weights

    def check_finite(self, gradient: Any) -> None:  # noqa: ARG002 - the parameters have it
        """Raises NotFiniteError if a gradient has NaN or an infinity."""
        for name, tensor in self._tensors.items():
            if tensor.grad is None:
                continue
            places = torch.nonzero(~torch.isfinite(tensor.grad.to_dense()))
            if len(places):
                index = tuple(places[0].tolist())
                raise NotFiniteError(f"the gradient at {shown(name)} must be finite", path=name, index=index)

    def update(self, gradient: Any, step: int, metrics: Mapping[str, float]) -> None:  # noqa: ARG002 - torch has them
        """Makes a step with the gradients of the parameters."""
        self._optimizer.step()

    def outer_gradient(self) -> Any:
        """Returns how far the parameters are from the weights of the version."""
        return {
            name: np.subtract(self._before[name], tensor.numpy(force=True)) for name, tensor in self._tensors.items()
        }
