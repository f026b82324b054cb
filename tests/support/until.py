"""The way in which a test waits for what another thread or process does."""

import inspect
import linecache
from pathlib import Path
from time import monotonic, sleep  # bound here: some tests replace those of the module
from typing import TypeVar

Value = TypeVar("Value")

# How often the condition is checked: after this many real seconds, even while the clock of redisacc is moved.
PAUSE = 0.005


def until(condition, timeout=30.0, *, details=None):
    """Waits for a condition to come true, and returns its first true value.

    Args:
        condition: what is waited for. It may fail an assertion if it can no longer come true.
        timeout: how long to wait, in seconds.
        details: returns what the error shows besides the last value, such as a log.
    """
    deadline = monotonic() + timeout
    while not (value := condition()):
        if monotonic() >= deadline:
            also = "" if details is None else f"\n{details()}"
            raise AssertionError(f"false for {timeout:g} s, last {value!r}: {_described(condition)}{also}")
        sleep(PAUSE)
    return value


def _described(condition):
    function = inspect.unwrap(condition)
    code = getattr(function, "__code__", None)
    if code is None:
        return repr(condition)
    line = linecache.getline(code.co_filename, code.co_firstlineno).strip()
    return f"{line} ({Path(code.co_filename).name}:{code.co_firstlineno})"
