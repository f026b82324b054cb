"""Something that happens in the middle of a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def before_next_call(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, action: Callable[[dict[str, Any]], object]
) -> None:
    """Does something once, before the next call of a method.

    Args:
        monkeypatch: of the test.
        owner: the class of the method.
        name: its name.
        action: gets the named arguments of the call.
    """
    method = getattr(owner, name)

    def first_the_action(self: Any, *args: Any, **options: Any) -> Any:
        monkeypatch.setattr(owner, name, method)
        action(options)
        return method(self, *args, **options)

    monkeypatch.setattr(owner, name, first_the_action)
