"""What `redisacc doctor` checks of a server or a cluster: its masters, settings, clock and scripts, and a trial."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

import numpy as np

from redisacc._clock import durations
from redisacc._handles.dense import ConditionalAccumulator
from redisacc._handles.options import Limits
from redisacc._text import QUOTED, listed, printable
from redisacc._wire.connect import DEFAULT_URL
from redisacc._wire.faults import NotPermittedError
from redisacc._wire.replies import parse_info
from redisacc._wire.slot_map import SLOTS
from redisacc._wire.transport import Transport
from redisacc.errors import RedisAccError, ServerError
from redisacc.tools.monitoring.facts import bytes_text, count_text
from redisacc.tools.monitoring.nodes import version_of

_OLDEST = {"Redis": (6, 2), "Valkey": (7, 2)}
_PINGS = 100
# A round trip that takes longer than this dominates the cost of a small gradient, in seconds.
_SLOW = 0.005
# Difference between two clocks that is reported, in seconds.
_CLOCK = 2.0

# How many addresses a finding lists.
_LISTED = 3

# The advice if this user may not run the commands of a check. Most users need not be able to.
_AS_OPERATOR = "run doctor once as a user who may, such as an operator of all names (`redisacc acl operator '*'`)"

_LIBRARIES = ("struct", "cmsgpack", "bit")

_ABILITIES = "return {" + ", ".join(f"rawget(_G, '{name}') and '{name}' or ''" for name in _LIBRARIES) + "}"


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        status: "ok"; "warn" if it works but could be better; "bad" if it must be changed.
        found: the facts.
        advice: the remedy; with "ok", a hint where there is one, else empty.
    """

    status: Literal["ok", "warn", "bad"]
    found: str
    advice: str = ""


ok, warn, bad = partial(Finding, "ok"), partial(Finding, "warn"), partial(Finding, "bad")


def servers_of(transport: Transport) -> tuple[dict[str, dict[str, str]], dict[str, str]]:
    """Returns what the server, or each master of a cluster that answers, says; and why another one does not.

    Returns:
        Address → INFO as a flat dict, empty if this user may not run it, and its setting "save", if this user may ask
        for that; and address → the reason.
    """
    infos, silent = _ask_all(transport, "INFO")
    saves, _ = _ask_all(transport, "CONFIG", "GET", "save")
    addresses = dict.fromkeys([*infos, *saves]) or [transport.address]
    return {each: parse_info(infos.get(each)) | _setting_in(saves.get(each)) for each in addresses}, silent


def _ask_all(transport: Transport, *command: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns address → the reply of each master that answers, and address → why another one does not.

    There are no replies if this user may not run the command.
    """
    try:
        replies, silent = transport.on_masters([command], reachable=True)
    except ServerError:
        return {}, {}
    return {address: reply for address, [reply] in replies.items()}, silent


def findings(what: str, servers: Mapping[str, dict[str, str]]) -> Iterator[Finding]:
    """Yields the problems that a check of ``OF_EACH`` finds, or its finding on the first server if there are none.

    Problems of several servers with the same remedy are one finding.
    """
    check, needs = OF_EACH[what]
    alike: dict[tuple[str, str], list[tuple[str, Finding]]] = {}
    for address, info in servers.items():
        finding = check(info) if needs in info else _UNKNOWN
        alike.setdefault((finding.status, finding.advice), []).append((address, finding))
    wrong = [found for (status, _), found in alike.items() if status != "ok"]
    if len(servers) == 1 or not wrong:
        yield next(iter(alike.values()))[0][1]
        return
    for (address, finding), *others in wrong:
        same = f"; the same on {listed(others, _LISTED, lambda other: other[0])}" if others else ""
        yield dataclasses.replace(finding, found=f"{address}: {finding.found}{same}")


_UNKNOWN = warn("unknown, because this user may not run INFO", "run doctor as a user who may run INFO")


def _version(info: dict[str, str]) -> Finding:
    name, text = version_of(info)
    numbers = tuple(int(part) for part in text.split(".")[:2] if part.isdigit())
    found = f"{name} {text}"
    if info.get("cluster_enabled") == "1":
        found += ", a cluster"
    if len(numbers) < 2 or numbers < _OLDEST[name]:
        oldest = ".".join(map(str, _OLDEST[name]))
        return bad(found, f"use {name} {oldest} or later")
    return ok(found)


def _role(info: dict[str, str]) -> Finding:
    if info["role"] != "master":
        master = f"{info.get('master_host')}:{info.get('master_port')}"
        return bad(f"a replica of {master}", "connect to the primary, or through Sentinel")
    return ok(f"primary with {count_text(int(info.get('connected_slaves', '0')), 'replica')}")


def _eviction(info: dict[str, str]) -> Finding:
    policy = info["maxmemory_policy"]
    limit = int(info.get("maxmemory", "0"))
    if policy == "noeviction":
        return ok("noeviction")
    advice = "run CONFIG SET maxmemory-policy noeviction, and set it in the server's configuration file"
    if limit == 0:
        return warn(f"{policy}, without effect as long as maxmemory is not set", advice)
    return bad(f"{policy}: at {bytes_text(limit)} the server deletes gradients", advice)


def _memory(info: dict[str, str]) -> Finding:
    used, limit = int(info["used_memory"]), int(info.get("maxmemory", "0"))
    ceiling = limit or int(info.get("total_system_memory", "0"))
    found = f"{bytes_text(used)} used" + (f" of {bytes_text(ceiling)}" if ceiling else "")
    found += "" if limit else ", no maxmemory"
    if ceiling and used > 0.8 * ceiling:
        return bad(found, "take rounds or delete accumulators, or give the server more memory")
    if not limit:
        return warn(
            found,
            "run CONFIG SET maxmemory, so that a full server refuses data instead of being killed by the system",
        )
    return ok(found)


def _persistence(info: dict[str, str]) -> Finding:
    for what, status in (("AOF write", "aof_last_write_status"), ("RDB save", "rdb_last_bgsave_status")):
        if info.get(status, "ok") != "ok":
            return bad(
                f"the last {what} failed",
                "read the server's log; the disk may be full",
            )
    if info["aof_enabled"] == "1":
        return ok("append-only file")
    survive = "run CONFIG SET appendonly yes if accumulators must survive a {} of the server"
    if "save" not in info:
        found = "no append-only file; snapshots are unknown, because this user may not run CONFIG GET"
        return warn(found, survive.format("crash"))
    if not info["save"]:
        return warn("nothing is kept on disk", survive.format("restart"))
    changes = count_text(int(info.get("rdb_changes_since_last_save", "0")), "change")
    return ok(f"snapshots; a crash now would lose {changes}")


def _setting_in(reply: Any) -> dict[str, str]:
    """Returns what a reply to CONFIG GET holds: nothing if there is none, or the server does not know the setting."""
    # A list of names and values, or with protocol 3 a dict.
    pairs = reply.items() if isinstance(reply, dict) else zip(*[iter(reply or ())] * 2, strict=True)
    return {printable(name, QUOTED): printable(value, QUOTED) for name, value in pairs}


# What is checked of each server, or of each master of a cluster; and what it must say for that.
OF_EACH: dict[str, tuple[Callable[[dict[str, str]], Finding], str]] = {
    "version": (_version, "redis_version"),
    "role": (_role, "role"),
    "eviction": (_eviction, "maxmemory_policy"),
    "memory": (_memory, "used_memory"),
    "persistence": (_persistence, "aof_enabled"),
}


def cluster(transport: Transport, silent: Mapping[str, str]) -> Finding:
    """Returns whether every slot has an owner and every master a replica, and how the cluster treats failures.

    Args:
        transport: the way to the cluster.
        silent: address → the reason, of each master that does not answer.
    """
    slot_map = transport.slot_map()
    full_coverage, node_timeout = (
        _setting(transport, name) for name in ("cluster-require-full-coverage", "cluster-node-timeout")
    )
    masters = count_text(len(slot_map.masters), "master")
    replicas = _replicas_text([len(of_one) for of_one in slot_map.replicas.values()])
    found = (
        f"{masters}, {replicas}; cluster-node-timeout {_seconds_text(node_timeout)}; cluster-require-full-coverage "
        f"{full_coverage or 'unknown'}"
    )
    if slot_map.uncovered:
        return bad(
            f"{slot_map.uncovered} of {SLOTS} slots {'has' if slot_map.uncovered == 1 else 'have'} no master; {found}",
            "start the masters that are missing, or assign their slots to others: accumulators in these slots cannot "
            "be used" + (", and neither can any other" if full_coverage == "yes" else ""),
        )
    if silent:
        address, reason = next(iter(silent.items()))
        more = f", nor do {len(silent) - 1} others" if len(silent) > 1 else ""
        return bad(
            f"the master {address} does not answer ({reason}){more}; {found}",
            "start it again, or promote a replica of it: accumulators in its slots cannot be used"
            + (", and soon neither can any other" if full_coverage == "yes" else ""),
        )
    alone = [str(master) for master, replicas in slot_map.replicas.items() if not replicas]
    if alone:
        stops = " and stops all others" if full_coverage == "yes" else ""
        return warn(
            found,
            f"give every master a replica, because a master without one takes its accumulators with it{stops} when it "
            f"fails ({listed(alone, _LISTED)})",
        )
    return ok(found)


def _replicas_text(numbers: list[int]) -> str:
    low, high = min(numbers), max(numbers)
    return f"{count_text(low, 'replica') if low == high else f'{low} to {high} replicas'} each"


def _setting(transport: Transport, name: str) -> str:
    """Returns a setting of a node; "" if this user may not ask, or the server does not know it."""
    try:
        return _setting_in(transport.call("CONFIG", "GET", name)).get(name, "")
    except ServerError:
        return ""


def _seconds_text(milliseconds: str) -> str:
    return f"{int(milliseconds) / 1000:g} s" if milliseconds.isdigit() else "unknown"


def access(transport: Transport, url: str | None) -> Finding:
    """Returns who this user is, and whether strangers could be."""
    # Of the nodes in a cluster's URL, the first one counts: all have the same settings.
    given = url or DEFAULT_URL
    parts = urlsplit(given.partition(",")[0] if "+cluster://" in given else given)
    # Most users may not ask who they are.
    user = printable(unquote(parts.username or "default"), QUOTED)
    with suppress(ServerError):
        user = printable(transport.call("ACL", "WHOAMI"), QUOTED)
    local = parts.scheme == "unix" or parts.hostname in ("localhost", "127.0.0.1", "::1")
    if parts.password is None and not local:
        return warn(
            f"user {user}, without a password",
            "set a password or an ACL, because anybody who reaches the server can read and change everything",
        )
    if parts.scheme in ("redis", "redis+cluster") and not local:
        secure = parts.scheme.replace("redis", "rediss")
        return warn(f"user {user}, without TLS", f"use {secure}:// unless the network is trusted")
    return ok(f"user {user}" + ("" if local else ", with a password and TLS"))


def lua(transport: Transport) -> Finding:
    """Returns which libraries scripts have."""
    try:
        reply = transport.call("EVAL", _ABILITIES, 0)
    except NotPermittedError:
        return warn("not looked at, because this user may not run EVAL", _AS_OPERATOR)
    except ServerError as error:
        return bad(str(error), "use a server that runs Lua scripts, because every operation is one")
    present = [printable(name, QUOTED) for name in reply if name]
    lacking = [name for name in _LIBRARIES if name not in present]
    if "struct" in lacking:
        return warn(
            f"no {', '.join(lacking)}",
            "use a server with these libraries; without struct, every gradient is buffered and added by the taker, and "
            "lua/inspect/index.lua does not work",
        )
    return ok(", ".join(present))


def clock(transport: Transport) -> Finding:
    """Returns how far the server's clock is from this machine's."""
    before = time.time()
    seconds, micros = transport.call("TIME")
    after = time.time()
    offset = int(seconds) + int(micros) / 1e6 - (before + after) / 2
    found = f"{offset:+.3f} s compared with this machine"
    if abs(offset) > _CLOCK + (after - before):
        # Leases are measured by the server's clock alone, so nothing breaks.
        return warn(found, "run a time service; otherwise, times of events and in logs disagree")
    return ok(found)


def latency(transport: Transport) -> Finding:
    """Returns how long round trips take."""
    times = []
    for _ in range(_PINGS):
        start = time.perf_counter()
        # Not PING, which the access rules of most roles do not allow.
        transport.call("TIME")
        times.append(time.perf_counter() - start)
    median, worst = statistics.median(times), max(times)
    found = f"median {median * 1e3:.2f} ms, maximum {worst * 1e3:.2f} ms of {_PINGS} round trips"
    if median > _SLOW:
        return warn(found, "move the server closer, because a small gradient costs a round trip")
    return ok(found)


def trial(transport: Transport) -> Finding:
    """Applies and takes a buffered gradient in a private accumulator."""
    step = "creating an accumulator"
    try:
        with ConditionalAccumulator(
            np.float32, [2], name="doctor", redis=transport.where, worker="doctor", limits=Limits(in_place=0)
        ) as accumulator:
            step = "listening to events"
            with accumulator.events(timeout=durations.trial) as events:
                step = "applying a gradient"
                accumulator.apply_grad([1, 2])
                step = "listening to events"
                heard = any(event.kind == "applied" for event in events)
            step = "reading it"
            accumulator.info()
            step = "taking it"
            taken = accumulator.take_grad(1, timeout=durations.trial)
            step = "removing the accumulator"
        if taken.tolist() != [1, 2]:
            return bad(f"the gradient [1, 2] came back as {taken.tolist()}", "use another server")
    except NotPermittedError as error:
        # No role but an operator of all names may do all of this, and each does its own work without the rest.
        found = f"broken off: {step} is not permitted to this user ({error.__cause__ or error})"
        if "acl --load" in str(error):
            return warn(found, "run `redisacc acl --load` as an operator: only the loaded scripts run")
        return warn(found, _AS_OPERATOR)
    except RedisAccError as error:
        return bad(f"{step} failed: {error}", "mend the server first")
    if not heard:
        return warn(
            "no events arrive",
            "allow the channels redisacc:*; without events, a waiting take polls once a second",
        )
    return ok("a gradient was applied, announced, read and taken")
