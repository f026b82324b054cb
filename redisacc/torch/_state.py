"""The state of an optimizer, from torch's form to that of a run, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from redisacc import optim
from redisacc._arrays.validation import Array
from redisacc._text import shown
from redisacc.errors import InvalidArgumentError
from redisacc.optim.base import EMA
from redisacc.torch._upload import dtype_name, is_elsewhere

# The name of the number of updates, in torch and here.
STEP, UPDATES = "step", "updates"
# What a number of Python has as its key in a tree of a state.
_NUMBER = "number"


def state_of(
    optimizer: torch.optim.Optimizer, tensors: Mapping[str, torch.Tensor], counterpart: optim.Optimizer
) -> dict[str, Any] | None:
    """Returns the state of an optimizer of torch as a run begins with it; None if the optimizer is new.

    Args:
        optimizer: the optimizer.
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
    """Returns the state of each parameter as an optimizer of torch has it.

    Args:
        optimizer: the optimizer.
        tensors: its parameters, by name.
        published: the state of the run.
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


def plain(name: str) -> str:
    """Returns the name of a parameter without what torch.compile() adds: a process may compile, and another may not."""
    return name.replace("_orig_mod.", "")


def as_bytes(tensor: torch.Tensor) -> Array:
    """Returns the bytes of a tensor in host memory, shared if they are there: torch has dtypes that numpy lacks."""
    found: Array = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return found


def as_array(tensor: torch.Tensor) -> Array:
    """Returns the elements of a tensor in host memory, shared if they are there; bytes if numpy lacks the dtype."""
    found: Array = as_bytes(tensor) if _is_foreign(tensor) else tensor.detach().cpu().numpy()
    return found


def _is_foreign(tensor: torch.Tensor) -> bool:
    """Returns whether numpy lacks the dtype of a tensor."""
    return (tensor.is_floating_point() or tensor.is_complex()) and not hasattr(np, dtype_name(tensor))


def state_tree(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Returns the state of each parameter as a tree of arrays: torch's own format would have to be unpickled.

    Raises:
        InvalidArgumentError: the optimizer keeps something else than tensors and numbers.
    """
    every = optimizer.state_dict()["state"]
    return {str(number): {key: _packed(value, key) for key, value in state.items()} for number, state in every.items()}


def state_in_tree(tree: Any) -> dict[int, dict[str, Any]]:
    """Returns the state in a tree, as ``load_state_dict`` takes it.

    Raises:
        Exception: it has another form, because anybody may have published it.
    """
    return {int(number): {key: _unpacked(each) for key, each in state.items()} for number, state in tree.items()}


def _packed(value: Any, key: str) -> Any:
    if isinstance(value, torch.Tensor):
        if not _is_foreign(value):
            return value.numpy(force=True).copy()
        # Bytes in a further dimension, because numpy lacks the dtype.
        return {dtype_name(value): value.detach().cpu().contiguous().unsqueeze(-1).view(torch.uint8).numpy()}
    if isinstance(value, (bool, int, float)):
        return {_NUMBER: np.array(value)}
    if isinstance(value, (list, tuple)):
        return [_packed(each, key) for each in value]
    if value is not None:
        raise InvalidArgumentError(
            f"{shown(key)} in the state of the optimizer is a {type(value).__name__}: only tensors, numbers and lists "
            "of them can be published"
        )
    return None


def _unpacked(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy())
    if isinstance(value, dict):
        [(name, array)] = value.items()
        if name == _NUMBER:
            return array.item()
        return torch.from_numpy(array.copy()).view(getattr(torch, name)).squeeze(-1)
    return value and [_unpacked(each) for each in value]


def check(tensors: Mapping[str, torch.Tensor], tree: Any, shared_name: str) -> None:
    """Checks that a tree has a value for each tensor.

    Args:
        tensors: the tensors, by name.
        tree: the values.
        shared_name: the name of the run.

    Raises:
        InvalidArgumentError: the values are another model's.
    """
    if not isinstance(tree, dict) or tree.keys() != tensors.keys():
        there = {*tree} if isinstance(tree, dict) else set()
        name = min(there ^ tensors.keys(), default="")
        where = "the model lacks" if name in there else "only the model has"
        raise InvalidArgumentError(
            f"another model is trained under the name {shown(shared_name)}: {where} the parameter {shown(name)}"
        )
    for name, tensor in tensors.items():
        values, expected = tree[name], (dtype_name(tensor), tuple(tensor.shape))
        if _is_foreign(tensor):
            expected = "uint8", (tensor.nbytes,)
        if (str(values.dtype), values.shape) != expected:
            raise InvalidArgumentError(
                f"another model is trained under the name {shown(shared_name)}: parameter {shown(name)} is "
                f"{values.dtype} of shape {values.shape} there, and {expected[0]} of shape {expected[1]} here"
            )


def write(tensors: Mapping[str, torch.Tensor], tree: Any, shared_name: str) -> None:
    """Writes values into tensors in place. The arguments, and what is raised, are those of ``check``."""
    check(tensors, tree, shared_name)
    for name, tensor in tensors.items():
        if is_elsewhere(tensor) or _is_foreign(tensor):
            with torch.no_grad():
                tensor.copy_(torch.from_numpy(np.array(tree[name])).view(tensor.dtype).reshape(tensor.shape))
        else:
            np.copyto(tensor.detach().numpy(), tree[name])
            # As if torch had written it: a second backward through the old weights is an error.
            torch.autograd.graph.increment_version(tensor)
