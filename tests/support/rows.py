"""Tables of rows that a test goes through in one case."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

from redisacc._text import shown

Test = Callable[..., None]


def every_row(names: str, rows: Iterable[Any]) -> Callable[[Test], Test]:
    """Like `pytest.mark.parametrize`, for rows so quick that a case for each would take longer than the test.

    All rows share the fixtures. A failure ends the test and has the row in a note.
    """
    parameters, table = names.split(", "), list(rows)

    def decorate(test: Test) -> Test:
        @functools.wraps(test)
        def in_turn(**fixtures: Any) -> None:
            assert table, "a table without rows tests nothing"
            for number, row in enumerate(table):
                values = dict(zip(parameters, row if len(parameters) > 1 else [row], strict=True))
                try:
                    test(**fixtures, **values)
                except BaseException as error:
                    error.add_note(f"in row {number} of {names}: {shown(row)}")
                    raise

        signature = inspect.signature(test)
        kept = [one for name, one in signature.parameters.items() if name not in parameters]
        in_turn.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
        return in_turn

    return decorate
