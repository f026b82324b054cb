"""`redisacc doctor`: is this server fit for accumulators, and what to change."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

import click
import numpy as np
import redis as redis_py

from redisacc import __version__
from redisacc._dense import ConditionalAccumulator
from redisacc._link import DEFAULT_URL, Link
from redisacc.cli._common import (
    EXIT_CODES,
    FAILED,
    bytes_text,
    console,
    echo_json,
    json_option,
    link_of,
    redis_option,
    reported,
    safe,
)
from redisacc.errors import CorruptDataError, RedisAccError, ServerError

__all__ = ["doctor"]

_OLDEST = {"Redis": (6, 2), "Valkey": (7, 2)}
_PINGS = 100
# Beyond this a round trip is what a small gradient mostly costs, in seconds.
_SLOW = 0.005
_CLOCK = 2.0

_LIBRARIES = ("struct", "cmsgpack", "bit")

_ABILITIES = "return {" + ", ".join(f"rawget(_G, '{name}') and '{name}' or ''" for name in _LIBRARIES) + "}"


@dataclass(frozen=True)
class Finding:
    """What one check found.

    Attributes:
        what: which check.
        status: "ok"; "warn": it works, but read this; "bad": this has to be changed.
        found: what is so.
        advice: what to change, for the last two.
    """

    what: str
    status: Literal["ok", "warn", "bad"]
    found: str
    advice: str = ""


@click.command(epilog=EXIT_CODES)
@redis_option
@json_option
@reported
def doctor(*, url: str | None, as_json: bool) -> None:
    """Check a server: version, eviction, persistence, access, Lua, clock, latency; and say what to change.

    It also applies and takes a small gradient, in an accumulator of its own that it removes. Exit code 1: something has
    to be changed.
    """
    link = link_of(url)
    findings = list(examine(link, url))
    if as_json:
        echo_json([vars(finding) for finding in findings])
    else:
        _print(findings)
    if any(finding.status == "bad" for finding in findings):
        raise SystemExit(FAILED)


def examine(link: Link, url: str | None) -> Iterator[Finding]:
    """All checks, one after the other."""
    info = _info(link)
    checks: tuple[Callable[[], Finding], ...] = (
        lambda: _version(info),
        lambda: _role(info),
        lambda: _eviction(info),
        lambda: _memory(info),
        lambda: _persistence(info),
        lambda: _access(link, url),
        lambda: _lua(link),
        lambda: _clock(link),
        lambda: _latency(link),
        lambda: _trial(link),
    )
    yield Finding("client", "ok", f"redisacc {__version__}, redis-py {redis_py.__version__}, {link.address}")
    for check in checks:
        yield check()


def _info(link: Link) -> dict[str, str]:
    """INFO as a flat dict; empty where this user may not ask."""
    try:
        text = link.call("INFO")
    except ServerError:
        return {}
    lines = bytes(text).decode(errors="replace").splitlines()
    return dict(line.partition(":")[::2] for line in lines if ":" in line)


def _unknown(what: str) -> Finding:
    return Finding(what, "warn", "not known: this user may not use INFO", "look as a user who may, or ask who runs it")


def _version(info: dict[str, str]) -> Finding:
    if not info:
        return _unknown("version")
    name = "Valkey" if "valkey_version" in info else "Redis"
    text = info.get(f"{name.lower()}_version", "")
    numbers = tuple(int(part) for part in text.split(".")[:2] if part.isdigit())
    found = f"{name} {text}"
    if info.get("cluster_enabled") == "1":
        found += ", a cluster"
    if len(numbers) < 2 or numbers < _OLDEST[name]:
        oldest = ".".join(map(str, _OLDEST[name]))
        return Finding("version", "bad", found, f"use {name} {oldest} or later")
    return Finding("version", "ok", found)


def _role(info: dict[str, str]) -> Finding:
    if not info:
        return _unknown("role")
    if info.get("role") != "master":
        master = f"{info.get('master_host')}:{info.get('master_port')}"
        return Finding("role", "bad", f"a replica of {master}", "use the address of the primary, or Sentinel")
    return Finding("role", "ok", f"primary, with {info.get('connected_slaves', '0')} replicas")


def _eviction(info: dict[str, str]) -> Finding:
    policy = info.get("maxmemory_policy")
    if policy is None:
        return _unknown("eviction")
    limit = int(info.get("maxmemory", "0"))
    if policy == "noeviction":
        return Finding("eviction", "ok", "noeviction")
    advice = "CONFIG SET maxmemory-policy noeviction (and in its configuration file)"
    if limit == 0:
        return Finding("eviction", "warn", f"{policy}, but no maxmemory is set", advice)
    return Finding("eviction", "bad", f"{policy}: at {bytes_text(limit)} gradients would vanish", advice)


def _memory(info: dict[str, str]) -> Finding:
    if "used_memory" not in info:
        return _unknown("memory")
    used, limit = int(info["used_memory"]), int(info.get("maxmemory", "0"))
    ceiling = limit or int(info.get("total_system_memory", "0"))
    found = f"{bytes_text(used)} used" + (f" of {bytes_text(ceiling)}" if ceiling else "")
    found += "" if limit else ", no maxmemory"
    if ceiling and used > 0.8 * ceiling:
        return Finding("memory", "bad", found, "take or remove what stands there, or give the server more memory")
    if not limit:
        return Finding(
            "memory", "warn", found, "CONFIG SET maxmemory: a full server then says so instead of being killed"
        )
    return Finding("memory", "ok", found)


def _persistence(info: dict[str, str]) -> Finding:
    if "aof_enabled" not in info:
        return _unknown("persistence")
    for what, status in (("AOF", "aof_last_write_status"), ("RDB", "rdb_last_bgsave_status")):
        if info.get(status, "ok") != "ok":
            return Finding(
                "persistence",
                "bad",
                f"the last {what} could not be written",
                "look into the server's log: a full disk?",
            )
    if info["aof_enabled"] == "1":
        return Finding("persistence", "ok", "append-only file")
    return Finding(
        "persistence",
        "warn",
        "no append-only file",
        "CONFIG SET appendonly yes, if accumulators are to survive a restart of the server",
    )


def _access(link: Link, url: str | None) -> Finding:
    user = "default"
    with suppress(ServerError, CorruptDataError):
        user = bytes(link.call("ACL", "WHOAMI")).decode(errors="replace")
    parts = urlsplit(url or DEFAULT_URL)
    local = parts.scheme == "unix" or parts.hostname in ("localhost", "127.0.0.1", "::1")
    if parts.password is None and not local:
        return Finding(
            "access",
            "warn",
            f"user {user}, without a password",
            "whoever reaches the server can read and change everything: set a password, or an ACL",
        )
    if parts.scheme == "redis" and not local:
        return Finding(
            "access", "warn", f"user {user}, without TLS", "use rediss:// where others can listen on the network"
        )
    return Finding("access", "ok", f"user {user}" + ("" if local else ", with a password and TLS"))


def _lua(link: Link) -> Finding:
    try:
        reply = link.call("EVAL", _ABILITIES, 0)
    except ServerError as error:
        return Finding("lua", "bad", str(error), "this user needs EVAL and EVALSHA: everything goes through scripts")
    there = [bytes(name).decode() for name in reply if name]
    lacking = [name for name in _LIBRARIES if name not in there]
    if "struct" in lacking:
        return Finding(
            "lua",
            "warn",
            f"no {', '.join(lacking)}",
            "every gradient is held whole and added up by takers; lua/inspect/index.lua does not work",
        )
    return Finding("lua", "ok", ", ".join(there))


def _clock(link: Link) -> Finding:
    before = time.time()
    seconds, micros = link.call("TIME")
    after = time.time()
    offset = int(seconds) + int(micros) / 1e6 - (before + after) / 2
    found = f"{offset:+.3f} s from this machine's"
    if abs(offset) > _CLOCK + (after - before):
        # Leases are measured by the server's clock alone, so nothing breaks.
        return Finding("clock", "warn", found, "run a time service: times in `tail` and in logs do not fit together")
    return Finding("clock", "ok", found)


def _latency(link: Link) -> Finding:
    times = []
    for _ in range(_PINGS):
        start = time.perf_counter()
        link.call("PING")
        times.append(time.perf_counter() - start)
    median, worst = statistics.median(times), max(times)
    found = f"{median * 1e3:.2f} ms, at worst {worst * 1e3:.2f} ms of {_PINGS}"
    if median > _SLOW:
        return Finding("latency", "warn", found, "bring the server nearer: small gradients cost a round trip each")
    return Finding("latency", "ok", found)


def _trial(link: Link) -> Finding:
    """A gradient in each way of holding, through an accumulator of our own."""
    step = "creating an accumulator"
    try:
        with ConditionalAccumulator(
            np.float32, [2], name="doctor", redis=link.client, worker="doctor", in_place_limit=0
        ) as accumulator:
            step = "listening to events"
            with accumulator.events(timeout=5.0) as events:
                step = "applying a gradient"
                accumulator.apply_grad([1, 2])
                step = "listening to events"
                heard = any(event.kind == "applied" for event in events)
            step = "reading it"
            accumulator.info()
            step = "taking it"
            taken = accumulator.take_grad(1, timeout=5.0)
            step = "removing the accumulator"
        if taken.tolist() != [1, 2]:
            return Finding("trial", "bad", f"a gradient came back as {taken.tolist()}", "this server can't be used")
    except RedisAccError as error:
        return Finding("trial", "bad", f"{step} failed: {error}", "give this user the rights of a worker")
    if not heard:
        return Finding(
            "trial", "warn", "no events come", "allow the channels redisacc:*; takes look once a second instead"
        )
    return Finding("trial", "ok", "a gradient was applied, announced, read and taken")


_MARKS = {"ok": ("ok  ", "green"), "warn": ("warn", "yellow"), "bad": ("BAD ", "red")}


def _print(findings: list[Finding]) -> None:
    width = max(40, console().width - 20)
    for finding in findings:
        mark, colour = _MARKS[finding.status]
        lines = click.wrap_text(safe(finding.found), width).splitlines() or [""]
        lines += click.wrap_text(safe(finding.advice), width, "-> ", "   ").splitlines() if finding.advice else []
        for number, line in enumerate(lines):
            head = f"{click.style(mark, fg=colour)}  {finding.what:<12}" if number == 0 else " " * 18
            click.echo(f"{head}  {line}")
