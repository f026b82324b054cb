"""What `redisacc doctor` checks of a Redis Cluster as a whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from redisacc._admin.catalogue import list_names
from redisacc._clock import durations
from redisacc._format.keys import Keys, ParameterKeys, PartitionedKeys
from redisacc._monitoring.facts import count_text
from redisacc._protocol.parameters.deletion import read_partitions
from redisacc._protocol.rounds.current_round import with_partitions
from redisacc._redis.faults import NotPermittedError
from redisacc._redis.slot_map import key_slot
from redisacc._redis.transport import Transport
from redisacc._text import QUOTED, printable
from redisacc.cli.checks.finding import Finding
from redisacc.errors import CorruptDataError, ServerError

_SETTINGS = ("cluster-require-full-coverage", "cluster-node-timeout")


def examine_cluster(transport: Transport, silent: Mapping[str, str]) -> Finding:
    """Returns whether every slot has an owner and every master a replica, and how the cluster treats failures.

    Args:
        transport: the way to the cluster.
        silent: address → the reason, of each master that does not answer.
    """
    slot_map = transport.slot_map(timeout=durations.opening)
    full_coverage, node_timeout = (_setting(transport, name) for name in _SETTINGS)
    masters = count_text(len(slot_map.masters), "master")
    replicas = _replicas_text([len(of_one) for of_one in slot_map.replicas.values()])
    found = (
        f"{masters}, {replicas}; cluster-node-timeout {_seconds_text(node_timeout)}; cluster-require-full-coverage "
        f"{full_coverage or 'unknown'}"
    )
    if slot_map.uncovered:
        return Finding(
            "cluster",
            "bad",
            f"{slot_map.uncovered} of 16384 slots {'has' if slot_map.uncovered == 1 else 'have'} no master; {found}",
            "start the masters that are missing, or assign their slots to others: accumulators in these slots cannot "
            "be used" + (", and neither can any other" if full_coverage == "yes" else ""),
        )
    if silent:
        address, reason = next(iter(silent.items()))
        more = f", nor do {len(silent) - 1} others" if len(silent) > 1 else ""
        return Finding(
            "cluster",
            "bad",
            f"the master {address} does not answer ({reason}){more}; {found}",
            "start it again, or promote a replica of it: accumulators in its slots cannot be used"
            + (", and soon neither can any other" if full_coverage == "yes" else ""),
        )
    alone = [str(master) for master, replicas in slot_map.replicas.items() if not replicas]
    if alone:
        stops = " and stops all others" if full_coverage == "yes" else ""
        return Finding(
            "cluster",
            "warn",
            found,
            f"give every master a replica, because a master without one takes its accumulators with it{stops} when it "
            f"fails ({', '.join(alone[:3])}{', …' if len(alone) > 3 else ''})",
        )
    return Finding("cluster", "ok", found)


def examine_partitions(transport: Transport) -> Finding:
    """Returns whether the partitions of all accumulators, and of parameters, are spread evenly over the masters."""
    slot_map = transport.slot_map(timeout=durations.opening)
    masters = len(slot_map.masters)
    uneven: list[str] = []
    counts = {"accumulator": 0, "parameters": 0}
    try:
        for name in list_names(transport):
            for what, keys in _with_partitions(transport, name):
                counts[what] += 1
                owners = Counter(slot_map.owner(key_slot(home)) for home in keys.homes)
                if max(owners.values()) > -(-len(keys.homes) // masters):
                    uneven.append(f"{what} {printable(name, QUOTED)}: {', '.join(_shares(owners))}")
    except NotPermittedError:
        return Finding("partitions", "warn", "unknown, because this user may not read the names and records")
    found = f"{count_text(counts['accumulator'], 'accumulator')}"
    if counts["parameters"]:
        found += f" and parameters of {count_text(counts['parameters'], 'name')}"
    found += " with partitions"
    if uneven:
        named = "; ".join(uneven[:3]) + ("; …" if len(uneven) > 3 else "")
        return Finding(
            "partitions",
            "warn",
            f"{found}, {len(uneven)} of them unevenly spread ({named})",
            "delete them when their training is finished and create them again: partitions are chosen at creation",
        )
    return Finding("partitions", "ok", found)


def _with_partitions(transport: Transport, name: str) -> Iterator[tuple[str, PartitionedKeys]]:
    """Yields "accumulator" and "parameters" with their keys, if what has this name is in partitions."""
    with suppress(CorruptDataError):
        keys = with_partitions(transport, Keys(name))
        if keys.partitions:
            yield "accumulator", keys
    with suppress(CorruptDataError):
        parameter_keys = read_partitions(transport, ParameterKeys(name))
        if parameter_keys.partitions:
            yield "parameters", parameter_keys


def _shares(owners: Counter[Any]) -> list[str]:
    return [f"{number} on {owner or 'no master'}" for owner, number in owners.most_common(5)]


def _replicas_text(numbers: list[int]) -> str:
    low, high = min(numbers), max(numbers)
    return f"{low if low == high else f'{low} to {high}'} {'replica' if low == high == 1 else 'replicas'} each"


def _setting(transport: Transport, name: str) -> str:
    """Returns a setting of a node; "" if this user may not ask, or the server does not know it."""
    try:
        reply: Any = transport.call("CONFIG", "GET", name)
    except ServerError:
        return ""
    values = list(reply.values()) if isinstance(reply, dict) else list(reply)[1:]
    return printable(values[0], QUOTED) if values else ""


def _seconds_text(milliseconds: str) -> str:
    return f"{int(milliseconds) / 1000:g} s" if milliseconds.isdigit() else "unknown"
