"""Any value, as an error message shows it."""

from __future__ import annotations


def shown(value: object) -> str:
    """A value for an error message: short, whatever it is."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - someone else's broken __repr__ must not hide our message
        text = f"<{type(value).__name__}>"
    text = " ".join(text.split())
    return text if len(text) <= 100 else text[:97] + "..."
