"""Which handles can be pickled: those whose way to the server another process can go as well."""

from __future__ import annotations

from redisacc._wire.connect import holds_password


def picklable_where(redis: object) -> object:
    """Returns what a handle remembers of ``redis=``: None or a URL, which a pickle may hold, or a client's class."""
    return redis if redis is None or isinstance(redis, str) else type(redis)


def check_picklable(where: object, shared_name: str | None) -> None:
    """Raises TypeError, with the reason and the remedy, if a handle cannot be pickled.

    Args:
        where: what ``picklable_where`` returned.
        shared_name: the name under which the copy would open the same; None for a private accumulator.
    """
    if shared_name is None:
        why = "its accumulator is private and ends with it. Give the accumulator a shared_name"
    elif isinstance(where, type):
        why = (
            f"it was opened with a client, {where.__name__}, whose connections belong to this process. Open "
            f"it with a URL or redis=None, or open {shared_name!r} by name in the other process"
        )
    elif isinstance(where, str) and holds_password(where):
        why = (
            "its URL holds a password, which would be readable in the pickle. Put the URL into REDISACC_URL in "
            f"every process and open it with redis=None, or open {shared_name!r} by name in the other process"
        )
    else:
        return
    raise TypeError(f"this handle cannot be pickled or copied: {why}")
