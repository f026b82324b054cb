"""The cluster of the chaos: its nodes die, slots move, replicas take over, nodes come and go, and nothing is lost.

Nothing is lost because every node replies only after writing its append-only file, and comes back with all of it. With
replicas, a killed master may also be replaced by its replica, which lacks what it had not received yet. Actors then
wait for replicas (``min_replicas``), and rely on nothing that was not confirmed. A replica takes over only if it was in
step a moment before, because what a replica discards while it is being filled anew is lost by the servers alone.
"""

import contextlib
import json
import os
import signal
import time
from functools import partial

import redis
from chaos.server import PAUSES
from support.proxy import Proxy
from support.resharding import (
    Move,
    hold_back,
    hold_back_no_more,
    migrate_at_once,
    replication,
    slot_of,
    wait_for_promotion,
)
from support.servers import ClusterClient, executable

from redisacc import embedded

# Nodes count as failed after this many milliseconds. Shorter pauses of a busy machine must not look like a failure,
# because a replica would take over that nobody has looked at.
NODE_TIMEOUT_MS = 15_000
# How many keys of a slot are moved one by one. There may be thousands.
SLOW_KEYS = 20
# How long the nodes have to agree with each other again, in seconds.
SETTLES = 90.0
# The file that says which proxy leads to which node.
PROXIES = "proxies.json"


class ClusterVictim:
    """A cluster of three masters, and more for a while.

    Attributes:
        keys: of the slots that move.

    Args:
        directory: for the nodes' data.
        key: whose slot moves, and whose master suffers most.
        replicas: of each master, 0 or 1.
        seed: of the proxies.
    """

    def __init__(self, directory, key, *, replicas, seed):
        self._directory = directory
        # Keys of other slots may be added. Each deed chooses one.
        self.keys = [key]
        self._key = key
        self._seed = seed
        self.min_replicas = replicas
        self._cluster = embedded.Cluster(
            3, replicas, directory / "nodes", durable=True, executable=executable("valkey")
        )
        self._proxies = {}
        self._weather = None
        self._added = []

    @property
    def url(self):
        return self._cluster.url

    def start(self):
        self._cluster.start(60)
        for node in self._cluster.nodes:
            self._configure(node)
            self._put_proxy_before(node)

    def _configure(self, node):
        node.ask("CONFIG", "SET", "appendfsync", "always", "cluster-node-timeout", NODE_TIMEOUT_MS)
        # Otherwise, a master that has lost its last slot becomes a replica.
        node.ask("CONFIG", "SET", "cluster-allow-replica-migration", "no")

    def _put_proxy_before(self, node):
        proxy = self._proxies[_port(node)] = Proxy(("127.0.0.1", _port(node)), self._seed + len(self._proxies))
        proxy.weather(self._weather)
        # Actors read the file while it is being replaced.
        text = json.dumps({port: proxy.port for port, proxy in self._proxies.items()})
        written = self._directory / f"{PROXIES}.new"
        written.write_text(text)
        written.rename(self._directory / PROXIES)

    def stop(self):
        for proxy in self._proxies.values():
            proxy.close()
        self._cluster.stop()

    def client(self):
        deadline = time.monotonic() + SETTLES
        while True:
            for node in self._cluster.nodes:
                with contextlib.suppress(redis.RedisError):
                    return ClusterClient(host="127.0.0.1", port=_port(node))
            assert time.monotonic() < deadline, "no node answers"
            time.sleep(0.1)

    def proxied(self):
        return {"ports": [_port(node) for node in self._cluster.nodes[:3]], "proxies": str(self._directory / PROXIES)}

    def proxies(self):
        return list(self._proxies.values())

    def weather(self, weather):
        self._weather = weather
        for proxy in self.proxies():
            proxy.weather(weather)

    # What the nodes know

    def _owner(self):
        return self._cluster.owner(self._key)

    def _masters(self):
        return [node for node in self._cluster.nodes if replication(node)["role"] == "master"]

    def _replica_of(self, master):
        followed = str(_port(master))
        return next(node for node in self._cluster.nodes if replication(node).get("master_port") == followed)

    def _any_master(self, chance):
        return self._owner() if chance.random() < 0.7 else chance.choice(self._masters())

    def _settle(self):
        """Waits until all nodes agree that the cluster is complete, and every replica is in step."""
        _wait(lambda: all(map(_is_settled, self._cluster.nodes)), "the nodes do not agree")
        if self.min_replicas:
            # Before this, a replica may not have what was confirmed before its master got it.
            _wait(lambda: all(map(self._has_caught_up, self._masters())), "a replica does not catch up")

    def _has_caught_up(self, master):
        replica, target = self._replica_of(master), int(replication(master)["master_repl_offset"])
        deadline = time.monotonic() + 1
        while time.monotonic() < deadline:
            facts = replication(replica)
            if facts["master_link_status"] == "up" and int(facts["slave_repl_offset"]) >= target:
                return True
            time.sleep(0.02)
        return False

    # Deeds

    def deeds(self):
        found = [
            *[self._flush, self._disconnect, self._disconnect_listeners] * 2,
            *[self._restart, self._pause, self._pause_clients],
            *[self._move, self._move_at_once] * 3,
            self._move_interrupted,
        ]
        if self.min_replicas:
            found += [self._fail_over, self._take_over] * 2
        else:
            found += [self._add, self._remove] * 2
        return [partial(self._do_with_a_slot, deed) for deed in found]

    def _do_with_a_slot(self, deed, chance):
        self._key = chance.choice(self.keys)
        return deed(chance)

    def calm_down(self):
        self._settle()

    def _flush(self, chance):
        self._any_master(chance).ask("SCRIPT", "FLUSH")
        return "SCRIPT FLUSH"

    def _disconnect(self, chance):
        self._any_master(chance).ask("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        return "CLIENT KILL TYPE normal"

    def _disconnect_listeners(self, chance):
        self._any_master(chance).ask("CLIENT", "KILL", "TYPE", "pubsub")
        return "CLIENT KILL TYPE pubsub"

    def _pause_clients(self, chance):
        what = chance.choice(["ALL", "WRITE"])
        self._owner().ask("CLIENT", "PAUSE", round(1000 * chance.choice(PAUSES)), what)
        return f"CLIENT PAUSE {what}"

    def _pause(self, chance):
        node = self._any_master(chance)
        with _stopped(node):
            time.sleep(chance.choice(PAUSES))
        return "pauses of a master"

    def _restart(self, chance):
        node = self._any_master(chance)
        node.kill()
        time.sleep(chance.uniform(0.0, 0.5))
        self._start(node)
        return "kills of a master that came back"

    def _start(self, node):
        node.start(60)
        self._configure(node)
        self._settle()

    def _target(self, chance):
        """Returns where the slot is, where it is to go, and the other masters."""
        source = self._owner()
        others = [node for node in self._masters() if node is not source]
        target = chance.choice(others)
        return source, target, [node for node in others if node is not target]

    def _move(self, chance):
        """Moves the slot key by key, so slowly that requests meet it half-way."""
        source, target, others = self._target(chance)
        self._move_to(source, target, others, chance.choice([0.0, 0.01, 0.1]))
        return "moves of the slot, key by key"

    def _move_to(self, source, target, others, pause, at_key=-1):
        """Moves the slot key by key.

        Args:
            source: where it is.
            target: where it is to go.
            others: the other masters.
            pause: how long to wait after each of the first keys, in seconds.
            at_key: after how many keys to kill the source or the target, and to start it again; -1: neither.
        """
        move = Move(slot_of(self._key), source, target, others)
        move.begin()
        number = 0
        while keys := source.ask("CLUSTER", "GETKEYSINSLOT", slot_of(self._key), 1 if number < SLOW_KEYS else 50):
            if number == at_key:
                victim = source if number % 2 else target
                victim.kill()
                self._start(victim)
            move.move(*keys)
            number += 1
            if number < SLOW_KEYS:
                time.sleep(pause)
        move.end()
        self._settle()

    def _move_interrupted(self, chance):
        """Moves the slot, and kills one of the two nodes meanwhile."""
        source, target, others = self._target(chance)
        self._move_to(source, target, others, 0.0, at_key=chance.randrange(4))
        return "moves of the slot during which a node was killed"

    def _move_at_once(self, chance):
        source, target, _ = self._target(chance)
        migrate_at_once(slot_of(self._key), source, target, lambda arrived: _wait(arrived, "the slot does not arrive"))
        self._settle()
        return "moves of the slot, with all keys at once"

    def _fail_over(self, _):
        """Lets the replica take over from its master by mutual agreement."""
        _wait(self._replica_of_owner_takes_over, "the replica does not take over")
        self._settle()
        return "failovers by agreement"

    def _replica_of_owner_takes_over(self):
        replica = self._replica_of(self._owner())
        replica.ask("CLUSTER", "FAILOVER")
        with contextlib.suppress(AssertionError):
            wait_for_promotion(replica, 10)
            return True
        return False

    def _take_over(self, chance):
        """Kills the master, and lets the replica take its place with what it has: mostly less than the master."""
        master = self._owner()
        replica = self._replica_of(master)
        hold_back(replica, master, lambda condition: _wait(condition, "the replica does not lose its master"))
        time.sleep(chance.choice([0.0, 0.1, 0.5]))
        master.kill()
        hold_back_no_more(replica)
        replica.ask("CLUSTER", "FAILOVER", "TAKEOVER")
        wait_for_promotion(replica)
        time.sleep(chance.choice([0.0, 0.5]))
        self._start(master)
        return "kills of a master whose replica lagged behind and took over"

    def _add(self, chance):
        if self._added:
            return self._move(chance)
        node = self._cluster.add_master()
        self._configure(node)
        self._put_proxy_before(node)
        self._added.append(node)
        source = self._owner()
        self._move_to(source, node, [one for one in self._masters() if one not in (source, node)], 0.0)
        return "nodes that were added"

    def _remove(self, chance):
        if not self._added:
            return self._move_at_once(chance)
        node = self._added.pop()
        target, *others = [one for one in self._cluster.nodes if one is not node]
        for key in self.keys:
            self._key = key
            if self._owner() is node:
                self._move_to(node, target, others, 0.0)
        self._cluster.remove_master(node)
        return "nodes that were removed"


def _port(node):
    return node.port


def _lines(text):
    return dict(line.split(":", 1) for line in text.splitlines() if ":" in line)


def _is_settled(node):
    """Returns whether a node sees a master for every slot, takes no node for failed, and has its master's data."""
    facts = _lines(node.ask("CLUSTER", "INFO"))
    if facts["cluster_state"] != "ok" or facts["cluster_slots_ok"] != "16384":
        return False
    flags = {flag for line in node.ask("CLUSTER", "NODES").splitlines() for flag in line.split()[2].split(",")}
    if flags & {"fail", "fail?"}:
        return False
    facts = replication(node)
    return facts["role"] == "master" or facts["master_link_status"] == "up"


def _wait(condition, failure):
    deadline = time.monotonic() + SETTLES
    while True:
        with contextlib.suppress(redis.RedisError):
            if condition():
                return
        assert time.monotonic() < deadline, failure
        time.sleep(0.02)


@contextlib.contextmanager
def _stopped(node):
    pid = node.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)
