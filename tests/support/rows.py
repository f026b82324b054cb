"""Tables of rows that a test goes through in one case."""

import functools
import inspect

from redisacc._text import shown


def every_row(names, rows):
    """Like `pytest.mark.parametrize`, for rows so quick that a case for each would take longer than the test.

    All rows share the fixtures. A failure ends the test and has the row in a note.
    """
    parameters, table = names.split(", "), list(rows)

    def decorate(test):
        @functools.wraps(test)
        def in_turn(**fixtures):
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
        in_turn.__signature__ = signature.replace(parameters=kept)
        return in_turn

    return decorate
