"""Messages about an accumulator, parameters or a run, which begin with its name."""

from __future__ import annotations

import logging

_logger = logging.getLogger("redisacc")


def warn(name: str, text: str, *values: object, **fields: object) -> None:
    """Logs a warning.

    Args:
        name: the name of the accumulator, of the parameters or of the run.
        text: the message, with a placeholder for each of the values.
        values: the values.
        fields: further fields of the record, for handlers that format them. The name is the field ``accumulator``.
    """
    _logger.warning(f"%s: {text}", name, *values, extra={"accumulator": name, **fields}, stacklevel=2)


def inform(name: str, text: str, *values: object, **fields: object) -> None:
    """Logs what is no problem. The arguments are those of ``warn``."""
    _logger.info(f"%s: {text}", name, *values, extra={"accumulator": name, **fields}, stacklevel=2)
