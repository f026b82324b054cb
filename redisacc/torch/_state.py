"""The state of an optimiser, from torch's form to that of a training, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from redisacc import optim
from redisacc._text import shown
from redisacc.errors import InvalidArgumentError
from redisacc.optim.base import EMA

# The name of the number of updates, in torch and here.
STEP, UPDATES = "step", "updates"


def state_of(
    optimizer: torch.optim.Optimizer, tensors: Mapping[str, torch.Tensor], counterpart: optim.Optimizer
) -> dict[str, Any] | None:
    """Returns the state of an optimiser of torch as a training begins with it; None if the optimiser is new.

    Args:
        optimizer: the optimiser.
        tensors: its parameters, by name.
        counterpart: what makes its updates.

    Raises:
        InvalidArgumentError: parameters have seen different numbers of updates.
    """
    # SGD does not count them. What matters is whether there have been any.
    steps = {name: int(optimizer.state[each].get(STEP, 1)) for name, each in tensors.items() if each in optimizer.state}
    updates = max(steps.values(), default=0)
    if not updates:
        return None
    for name, step in steps.items():
        if step not in (0, updates):
            raise InvalidArgumentError(
                f"the state of all parameters must have seen the same number of updates, but has {updates} and, for "
                f"{shown(name)}, {step}"
            )
    found: dict[str, Any] = {UPDATES: updates}
    for slot in counterpart.slots:
        found[slot] = {}
        for name, tensor in tensors.items():
            # One that never had a gradient has none.
            values = optimizer.state[tensor].get(slot) if tensor in optimizer.state else None
            array = None if values is None else values.numpy(force=True)
            found[slot][name] = counterpart.initial(slot, tensor.numpy(force=True)) if array is None else array
    return found


def torch_state(
    optimizer: torch.optim.Optimizer, tensors: Mapping[str, torch.Tensor], published: Mapping[str, Any]
) -> dict[torch.Tensor, dict[str, Any]]:
    """Returns the state of each parameter as an optimiser of torch has it.

    Args:
        optimizer: the optimiser.
        tensors: its parameters, by name.
        published: the state of the training.
    """
    updates = int(published[UPDATES])
    slots = [slot for slot in published if slot not in (UPDATES, EMA)]
    found = {}
    for name, tensor in tensors.items():
        state: dict[str, Any] = {slot: torch.from_numpy(np.array(published[slot][name])) for slot in slots}
        if isinstance(optimizer, torch.optim.SparseAdam):
            state[STEP] = updates
        elif not isinstance(optimizer, torch.optim.SGD):
            state[STEP] = torch.tensor(float(updates))
        if state:
            found[tensor] = state
    return found
