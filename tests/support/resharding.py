"""Moves slots between nodes of an embedded cluster, in both ways that servers know; lets replicas lag behind."""

import contextlib

import redis
from redis.crc import key_slot

from support.until import until


def slot_of(key):
    """Returns the slot of a key."""
    return key_slot(key.encode())


class Move:
    """The move of one slot, key by key, one step at a time: as redis-cli does it, but a test decides when."""

    def __init__(self, slot, source, target, others):
        self.slot = slot
        self._source, self._target, self._others = source, target, others
        self._ids = [node.ask("CLUSTER", "MYID") for node in (source, target)]

    def begin(self):
        """From now on, the source redirects commands for keys that it does not have."""
        self._target.ask("CLUSTER", "SETSLOT", self.slot, "IMPORTING", self._ids[0])
        self._source.ask("CLUSTER", "SETSLOT", self.slot, "MIGRATING", self._ids[1])

    def move(self, *keys):
        """Moves these keys."""
        self._source.ask("MIGRATE", "127.0.0.1", self._target.port or 0, "", 0, 5000, "KEYS", *keys)

    def move_all(self):
        """Moves keys until the source has none."""
        while keys := self._source.ask("CLUSTER", "GETKEYSINSLOT", self.slot, 10):
            self.move(*keys)

    def end(self):
        """Gives the slot to the target. The other nodes hear of it at once, too."""
        for node in (self._target, self._source, *self._others):
            node.ask("CLUSTER", "SETSLOT", self.slot, "NODE", self._ids[1])

    def whole(self):
        """Moves the slot with all its keys."""
        self.begin()
        # A key may be created at the source until its slot is empty there, so the last ones move with the slot.
        self.move_all()
        self.end()


def migrate_at_once(slot, source, target, until):
    """Moves a slot as Valkey 9 does by itself, with all its keys at one moment."""
    source.ask("CLUSTER", "MIGRATESLOTS", "SLOTSRANGE", slot, slot, "NODE", target.ask("CLUSTER", "MYID"))

    def arrived():
        # The source owns it too, in its own eyes, until it has heard of the target. It would refuse the next move.
        return all(
            any(start <= slot <= end and master[1] == target.port for start, end, master, *_ in ranges)
            for ranges in (node.ask("CLUSTER", "SLOTS") for node in (target, source))
        )

    until(arrived)


def replication(node):
    """Returns what a node says about its master or its replicas."""
    return dict(line.split(":", 1) for line in node.ask("INFO", "replication").splitlines() if ":" in line)


def hold_back(replica, master, until):
    """Lets a replica lag behind: it has all that its master has now, and receives nothing more, but can be promoted.

    A replica that is merely stopped would find what was sent meanwhile in its socket. This one cannot connect.
    """
    offset = int(replication(master)["master_repl_offset"])
    until(lambda: int(replication(replica)["slave_repl_offset"]) >= offset)
    replica.ask("CONFIG", "SET", "masteruser", "nobody", "masterauth", "wrong")
    master.ask("CLIENT", "KILL", "TYPE", "replica")
    until(lambda: replication(replica)["master_link_status"] == "down")


def hold_back_no_more(replica):
    """Lets it connect to its master again."""
    replica.ask("CONFIG", "SET", "masteruser", "", "masterauth", "")


def wait_for_promotion(node, timeout=40.0):
    """Waits until a replica has become a master."""

    def promoted():
        with contextlib.suppress(redis.RedisError):
            return "role:master" in node.ask("INFO", "replication")
        return False

    until(promoted, timeout)
