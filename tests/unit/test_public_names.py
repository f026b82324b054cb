"""What the package exports."""

from __future__ import annotations

import inspect

import pytest

import redisacc
from redisacc import errors, raw_ops


@pytest.mark.parametrize("module", [redisacc, errors, raw_ops])
def test_all_is_what_is_public(module: object) -> None:
    public = {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and (inspect.isclass(value) or inspect.isfunction(value)) and _ours(value, module)
    }
    modules = {"errors", "raw_ops"} if module is redisacc else set()
    assert set(module.__all__) == public | modules  # type: ignore[attr-defined]


def _ours(value: object, module: object) -> bool:
    home = value.__module__
    return home.startswith("redisacc") if module is redisacc else home == module.__name__  # type: ignore[attr-defined]


def test_every_error_stands_in_the_tree_with_its_bases() -> None:
    tree = errors.__doc__ or ""
    for name in errors.__all__:
        error = getattr(errors, name)
        assert issubclass(error, errors.RedisAccError)
        line = next(line for line in tree.splitlines() if f"{name}" in line.split("(")[0].split())
        for base in error.__bases__:
            if base.__module__ == "builtins" and base is not Exception:
                assert f"({base.__name__})" in line


@pytest.mark.parametrize("name", redisacc.__all__)
def test_everything_public_is_described(name: str) -> None:
    thing = getattr(redisacc, name)
    assert inspect.getdoc(thing)
    if inspect.isclass(thing):
        for attribute, value in vars(thing).items():
            if not attribute.startswith("_") and (callable(value) or isinstance(value, property)):
                assert inspect.getdoc(value), f"{name}.{attribute}"
