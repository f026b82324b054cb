"""What `redisacc doctor` checks of a Redis Cluster: its masters and replicas, slots that are being moved, partitions.

A slot that is being moved: would a failure of its target lose anything? Writes that `min_replicas=` has confirmed are
on replicas of the master that owned the slot at that time. The replicas of the new owner get the keys after their
master, and servers ensure that only in part: docs/guides/redis-cluster.md.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from redisacc._clock import clock
from redisacc._format.keys import Keys, ParameterKeys, PartitionedKeys
from redisacc._protocol.rounds.current_round import with_partitions
from redisacc._text import QUOTED, listed, printable
from redisacc._wire.faults import NotPermittedError
from redisacc._wire.replies import parse_info
from redisacc._wire.slot_map import SLOTS, Address, key_slot
from redisacc._wire.transport import Transport
from redisacc.errors import CorruptDataError, ServerError
from redisacc.tools.admin.catalog import list_names
from redisacc.tools.cli.checks import Finding, bad, ok, warn
from redisacc.tools.cli.checks.server import ask_all, setting_in
from redisacc.tools.monitoring.facts import count_text

_SETTINGS = ("cluster-require-full-coverage", "cluster-node-timeout")
# How long replicas have to confirm what their master had when it was asked, in seconds. They do so once a second.
_CONFIRMED_WITHIN = 2.5
_PAUSE = 0.1
# How many slots and targets a finding lists.
_LISTED = 3

# In CLUSTER NODES, "[93->-ID]" is a slot that is on its way to a node, and "[93-<-ID]" one that comes from it.
_MOVING = re.compile(r"\[(\d{1,5})-([<>])-([0-9a-f]{1,64})\]")
_HOST_AND_PORT = re.compile(r"(?P<host>[^@,]+):(?P<port>\d{1,5})(?:[@,].*)?")
# The states of a move that is over.
_OVER = ("success", "failed", "cancelled", "canceled")
_REPLICA = re.compile(r"ip=([^,]*),port=(\d+),state=([^,]*),offset=(\d+)")


def examine_cluster(transport: Transport, silent: Mapping[str, str]) -> Finding:
    """Returns whether every slot has an owner and every master a replica, and how the cluster treats failures.

    Args:
        transport: the way to the cluster.
        silent: address → the reason, of each master that does not answer.
    """
    slot_map = transport.slot_map()
    full_coverage, node_timeout = (_setting(transport, name) for name in _SETTINGS)
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


def examine_partitions(transport: Transport) -> Finding:
    """Returns whether the partitions of all accumulators, and of parameters, are spread evenly over the masters."""
    slot_map = transport.slot_map()
    masters = len(slot_map.masters)
    uneven: list[str] = []
    counts = {"accumulator": 0, "parameters": 0}
    try:
        for name in list_names(transport):
            for what, keys in _with_partitions(transport, name):
                counts[what] += 1
                owners = Counter(slot_map.owner(key_slot(home)) for home in keys.homes)
                shares = ", ".join(f"{number} on {owner or 'no master'}" for owner, number in owners.most_common(5))
                if max(owners.values()) > -(-len(keys.homes) // masters):
                    uneven.append(f"{what} {printable(name, QUOTED)}: {shares}")
    except NotPermittedError:
        return warn("unknown, because this user may not read the names and records")
    found = count_text(counts["accumulator"], "accumulator")
    if counts["parameters"]:
        found += f" and parameters of {count_text(counts['parameters'], 'name')}"
    found += " with partitions"
    if uneven:
        named = listed(uneven, _LISTED, separator="; ")
        return warn(
            f"{found}, {len(uneven)} of them unevenly spread ({named})",
            "delete them when their training is finished and create them again: partitions are chosen at creation",
        )
    return ok(found)


def _with_partitions(transport: Transport, name: str) -> Iterator[tuple[str, PartitionedKeys]]:
    """Yields "accumulator" and "parameters" with their keys, if what has this name is in partitions."""
    with suppress(CorruptDataError):
        keys = with_partitions(transport, Keys(name))
        if keys.partitions:
            yield "accumulator", keys
    with suppress(CorruptDataError):
        parameter_keys = with_partitions(transport, ParameterKeys(name))
        if parameter_keys.partitions:
            yield "parameters", parameter_keys


def _replicas_text(numbers: list[int]) -> str:
    low, high = min(numbers), max(numbers)
    return f"{count_text(low, 'replica') if low == high else f'{low} to {high} replicas'} each"


def _setting(transport: Transport, name: str) -> str:
    """Returns a setting of a node; "" if this user may not ask, or the server does not know it."""
    try:
        return setting_in(transport.call("CONFIG", "GET", name)).get(name, "")
    except ServerError:
        return ""


def _seconds_text(milliseconds: str) -> str:
    return f"{int(milliseconds) / 1000:g} s" if milliseconds.isdigit() else "unknown"


@dataclass(slots=True)
class _Node:
    """A node as CLUSTER NODES describes it.

    Attributes:
        address: where it is.
        replicas: where its replicas are.
        arriving: the slots that are on their way to it.
    """

    address: Address | None = None
    replicas: set[str] = field(default_factory=set)
    arriving: set[int] = field(default_factory=set)


def examine_moves(transport: Transport) -> Finding:
    """Returns which slots are being moved to a master whose replicas lag behind, or that has none."""
    replies, _ = ask_all(transport, "CLUSTER", "NODES")
    if not replies:
        return warn(
            "unknown, because this user may not run CLUSTER NODES",
            "run doctor as a user who may run CLUSTER NODES and INFO",
        )
    nodes = _read_nodes(replies.values())
    for target, slots in _moved_at_once(transport):
        nodes.setdefault(target, _Node()).arriving.update(slots)
    targets = [node for node in nodes.values() if node.arriving and node.address]
    if not targets:
        return ok("no slot is being moved")
    states = _states(transport, targets)
    found = [
        f"{_slots_text(node.arriving)} to {node.address}, {state}" for node, state in zip(targets, states, strict=True)
    ]
    said = f"being moved: {listed(found, _LISTED, separator='; ')}"
    if all(state == _KEEPS_UP for state in states):
        return ok(said)
    return warn(
        said,
        "before a slot changes its owner (CLUSTER SETSLOT … NODE), wait until the replicas of the new one have its "
        "keys: until then, its failure loses gradients that min_replicas= has confirmed",
    )


def _read_nodes(replies: Iterable[Any]) -> dict[str, _Node]:
    """Returns id → node, from the replies to CLUSTER NODES of all masters. A node knows only of its own moves."""
    nodes: dict[str, _Node] = {}
    for reply in replies:
        for line in bytes(reply or b"").decode(errors="replace").splitlines():
            identity, address, flags, master, *rest = [*line.split(" "), "", "", "", ""]
            match = _HOST_AND_PORT.fullmatch(address)
            if match is None:
                continue
            node = nodes.setdefault(identity, _Node())
            node.address = Address(printable(match["host"], QUOTED), int(match["port"]))
            if master not in ("", "-") and "fail" not in flags.split(","):
                nodes.setdefault(master, _Node()).replicas.add(str(node.address))
            for slot, direction, other in _MOVING.findall(" ".join(rest)):
                if "myself" in flags and "master" in flags and int(slot) < SLOTS:
                    target = other if direction == ">" else identity
                    nodes.setdefault(target, _Node()).arriving.add(int(slot))
    return nodes


def _moved_at_once(transport: Transport) -> Iterable[tuple[str, set[int]]]:
    """Yields the id of the target and the slots of each move by CLUSTER MIGRATESLOTS, which Valkey has from 9 on."""
    replies, _ = ask_all(transport, "CLUSTER", "GETSLOTMIGRATIONS")
    for reply in replies.values():
        for move in reply if isinstance(reply, list) else ():
            fields = dict(zip(move[::2], move[1::2], strict=False)) if isinstance(move, list) else {}
            texts = {name: fields.get(name) for name in (b"state", b"target_node", b"slot_ranges")}
            if all(isinstance(text, bytes) for text in texts.values()):
                state, target, ranges = (bytes(text or b"").decode(errors="replace") for text in texts.values())
                if state not in _OVER:
                    yield target, _slots_of(ranges)


def _slots_of(ranges: str) -> set[int]:
    """Returns the slots of "5-9 12-12"."""
    found: set[int] = set()
    for first, last in re.findall(r"(\d{1,5})-(\d{1,5})", ranges):
        found.update(range(int(first), min(int(last), SLOTS - 1) + 1))
    return found


_KEEPS_UP = "whose replicas have what it has"
_LAGS = " behind"


def _states(transport: Transport, targets: Sequence[_Node]) -> list[str]:
    """Returns a clause about each target's replicas, once they have had the time to confirm its data."""
    addresses = [node.address for node in targets if node.address]
    goals: dict[Address, int] = {}
    deadline = clock.now() + _CONFIRMED_WITHIN
    while True:
        replies, _ = ask_all(transport, "INFO", "replication", also=addresses)
        if not replies:
            return ["whose replicas are unknown, because this user may not run INFO"] * len(targets)
        states = [_state(node, parse_info(replies.get(str(node.address))), goals) for node in targets]
        if not any(state.endswith(_LAGS) for state in states) or clock.now() >= deadline:
            return states
        clock.sleep(_PAUSE)


def _state(node: _Node, info: dict[str, str], goals: dict[Address, int]) -> str:
    """Returns a clause about a target's replicas. goals: its offset when it was first asked."""
    if "master_repl_offset" not in info or node.address is None:
        return "which does not answer"
    goal = goals.setdefault(node.address, int(info["master_repl_offset"]))
    offsets = {
        str(Address(match[1], int(match[2]))): int(match[4]) if match[3] == "online" else -1
        for name, text in info.items()
        if re.fullmatch(r"slave\d+", name) and (match := _REPLICA.match(text))
    }
    known = sorted({*offsets, *node.replicas})
    if not known:
        return "which has no replica"
    late = [replica for replica in known if offsets.get(replica, -1) < goal]
    if not late:
        return _KEEPS_UP
    noun, verb = ("replica", "lags") if len(late) == 1 else ("replicas", "lag")
    return f"whose {noun} {listed(late, _LISTED)} {verb}{_LAGS}"


def _slots_text(slots: set[int]) -> str:
    return f"{'slot' if len(slots) == 1 else 'slots'} {listed(sorted(slots), _LISTED)}"
