"""Names processes, so that others on the same machine can find out whether one of them is dead."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import socket
from functools import lru_cache
from pathlib import Path
from typing import Literal

from redisacc._interrupts import interrupt_in

_IDENTITY = re.compile(r"([0-9a-f]{16})\.([0-9]{1,10})\.([0-9]{1,20})", re.ASCII)
_PROC = Path("/proc")


def own_identity(proc: Path = _PROC) -> str:
    """Returns the identity of this process: up to 64 ASCII characters without spaces.

    No other process ever has the same one: not of another machine, nor a later one with the same process id.
    """
    return _identity_of(os.getpid(), proc)


def memory_text(proc: Path = _PROC) -> str:
    """Returns how much memory of this process is resident, such as " 512 MiB"; "" if unknown."""
    try:
        pages = int((proc / "self/statm").read_text().split()[1])
    except OSError as error:
        if interrupt_in(error) is not None:
            raise
        return ""
    return f" {pages * os.sysconf('SC_PAGE_SIZE') >> 20} MiB"


def fate_of(identity: str, proc: Path = _PROC) -> Literal["alive", "dead"] | None:
    """Returns whether a process lives, or None if this process cannot know.

    That is so for processes of another machine or container, and everywhere but on Linux. "dead" is certain.

    Args:
        identity: what ``own_identity`` returned in that process.
        proc: where the kernel describes processes.
    """
    own = own_identity(proc)
    if identity == own:
        return "alive"
    mine, its = _IDENTITY.fullmatch(own), _IDENTITY.fullmatch(identity)
    if mine is None or its is None or its[1] != mine[1] or int(its[2]) == 0:
        return None
    pid = int(its[2])
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return "dead"
    except (PermissionError, OverflowError):
        # It lives, and belongs to somebody else; or there can be no such process.
        pass
    found = _state_and_start(pid, proc)
    if found is None:
        return None
    state, start = found
    # A zombie has ended, and waits only for its parent. With another start, its process id was used again.
    return "dead" if state in "ZX" or start != its[3] else "alive"


@lru_cache(maxsize=1)
def _identity_of(pid: int, proc: Path) -> str:
    found = _state_and_start(pid, proc)
    machine = _machine(proc)
    if found is None or machine is None:
        return secrets.token_hex(16)
    return f"{machine}.{pid}.{found[1]}"


def _machine(proc: Path) -> str | None:
    """Returns a digest that is equal for processes that see each other's process ids; None if unknown."""
    try:
        parts = [socket.gethostname(), (proc / "sys/kernel/random/boot_id").read_text()]
        # If /proc shows the process ids of another namespace, nothing can be said.
        if os.readlink(proc / "self") != str(os.getpid()):
            return None
        parts.append(os.readlink(proc / "self/ns/pid"))
        with contextlib.suppress(FileNotFoundError):
            parts.append(os.readlink(proc / "self/ns/time"))
    except OSError as error:
        if interrupt_in(error) is not None:
            raise
        return None
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=8).hexdigest()


def _state_and_start(pid: int, proc: Path = _PROC) -> tuple[str, str] | None:
    """Returns the state of a process, and when it started in clock ticks since the boot; None if unknown."""
    try:
        # Without a buffer and an encoding, which take longer than the rest: processes that stand by look often.
        with open(f"{proc}/{pid}/stat", "rb", buffering=0) as file:
            text = file.read()
        # The name of the program, in parentheses, may hold anything.
        fields = text[text.rindex(b")") + 1 :].decode("ascii").split(None, 20)
        return fields[0], fields[19]
    except (OSError, IndexError, ValueError) as error:
        if interrupt_in(error) is not None:
            raise
        return None
