"""Formats values for error messages."""

from __future__ import annotations


def shown(value: object) -> str:
    """Returns any value as an error message shows it: on one line, with at most 100 characters."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - someone else's broken __repr__ must not hide our message
        text = f"<{type(value).__name__}>"
    text = " ".join(text.split())
    return text if len(text) <= 100 else text[:97] + "..."
