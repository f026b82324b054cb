"""Databases that hold every key of stored.py, made by the public API, each as it was after every `restore`."""

import contextlib
import fnmatch
import re
import threading
import time

import numpy as np
from damages import NAMES, Gradient, damages
from stored import STORED

import redisacc
from redisacc import Limits, Mean, Sparse

HEAD = "redisacc:{w}"
SPEC = {"d": ("float32", (2, 2)), "i": ("int32", (3,)), "s": Sparse("float32", (9, 2))}
TREE = {"d": np.ones((2, 2), np.float32), "i": [1, 2, 3], "s": ([1, 4], [[1, 1], [2, 2]])}
ONES, ROWS = (np.ones(600, np.float32),), ([0, 1, 2], np.ones((3, 2), np.float32))
WIDE = ([3], np.ones((1, 600), np.float32))

INT8 = Gradient(nbytes=780, blocks=3)

# Name → the class, its arguments, its options, a gradient, and what its bytes are.
KINDS = {
    "dense": (redisacc.ConditionalAccumulator, ("float32", [600]), {}, ONES, Gradient()),
    "sparse": (redisacc.SparseConditionalAccumulator, ("float32", [9, 2]), {}, ROWS, Gradient((0, 1, 2), 8)),
    "unbounded": (redisacc.SparseConditionalAccumulator, ("float32", [None, 2]), {}, ROWS, Gradient((0, 1, 2))),
    "integers": (redisacc.ConditionalAccumulator, ("int32", [1]), {}, ([3],), Gradient(integers=True)),
    "tree": (redisacc.TreeAccumulator, (SPEC,), {"mean": Mean(missing="skip")}, (TREE,), Gradient((1, 4), 8, 76, 3)),
    "bfloat16": (redisacc.ConditionalAccumulator, ("float32", [600]), {"encoding": "bfloat16"}, ONES, Gradient()),
    "int8": (redisacc.ConditionalAccumulator, ("float32", [600]), {"encoding": "int8"}, ONES, INT8),
    "int8 rows": (
        redisacc.SparseConditionalAccumulator, ("float32", [99, 600]), {"encoding": "int8"}, WIDE,
        Gradient((3,), 98, 788, blocks=3),
    ),
}  # fmt: skip
STORAGES = {
    "in place": {"limits": Limits(in_place=10**9)},
    "inline": {"limits": Limits(in_place=0)},
    "parts": {"limits": Limits(in_place=0, inline=0)},
    "partitions": {"limits": Limits(in_place=0, inline=0), "partitions": 2},
}


class Place:
    """A value that can be damaged.

    Attributes:
        key: its key.
        what: the key and, of a hash, the field, as stored.py has them.
        damages: what can be done to it, by name; each writes over it.
    """

    def __init__(self, key, what, changes):
        self.key, self.what, self.damages = key, what, changes


class World:
    """A database with an accumulator `w`, or parameters.

    Attributes:
        client: the way to the server.
        where: what handles are opened with: this client, or a URL.
    """

    gradient = Gradient()
    # Patterns of keys of stored.py that are damaged here.
    damaged = "*"

    def __init__(self, client):
        self.client = self.where = client
        self._build()
        self._dumps = {key: client.dump(key) for key in client.scan_iter()}
        # Nobody reads the blobs that the record does not list.
        record = client.hmget(f"{HEAD}:parameters", "full", "rows", "state", "slots")
        listed = b" ".join(filter(None, record))
        found = [key for key in self._dumps if b":parameters:" not in key or _blob_of(key) in listed]
        # Ids are random, and the last blob of a sort comes first.
        self._read = sorted(found, key=lambda key: (-listed.find(_blob_of(key)), key))
        self.incarnation = client.hget(HEAD, "incarnation")

    def _build(self):
        raise NotImplementedError

    def open(self, **options):
        """Opens another handle of the accumulator."""
        raise NotImplementedError

    def apply(self, acc, **options):
        """Applies a gradient."""
        raise NotImplementedError

    def restore(self):
        """Brings back everything as it was."""
        with self.client.pipeline(transaction=False) as pipe:
            pipe.flushdb()
            for key, dump in self._dumps.items():
                pipe.restore(key, 0, dump)
            pipe.execute()

    def places(self):
        """Yields every place of every key, as stored.py has them: one of those that are alike.

        Raises:
            AssertionError: there is a key, or a field, that stored.py does not have.
        """
        seen = set()
        for key in self._read:
            name = key.decode()
            pattern = pattern_of(name)
            if not any(fnmatch.fnmatch(pattern, one) for one in self.damaged.split("|")):
                continue
            form = STORED[pattern]
            # Of the parts of gradients and blobs, each number and each sort.
            shown = pattern
            if pattern.endswith(":*"):
                shown = pattern.removesuffix("*") + re.sub(r".*-|.*:0+(?=:)", "", name)
            if shown in seen:
                continue
            if pattern not in seen:
                yield Place(key, f"{pattern} itself", _of_key(self.client, key, form))
            if isinstance(form, tuple):
                yield self._of_member(key, shown, *form)
            else:
                yield from self._of_fields(key, pattern, form, seen)
            seen |= {pattern, shown}

    def _of_fields(self, key, pattern, form, seen):
        fields = self.client.hgetall(key)
        others = [(name, sort) for name, sort in form.items() if name.startswith("<")]
        for field, held in sorted(fields.items()):
            name = field.decode(errors="replace")
            sort, shown = form.get(name), f"{pattern} {name}"
            if sort is None:
                assert others, f"{key!r} has an unknown field {field!r}"
                ((general, sort),) = others
                # Labels of a tree's sections come before the index.
                shown = f"{pattern} {name.rpartition(':')[0]}{general}"
            if shown in seen:
                continue
            seen.add(shown)
            changes = {
                damage.name: (_set_field(key, field, damage), damage.fits)
                for damage in damages(sort, held, gradient=self.gradient)
            }
            if form.get(name) is None:
                changes |= {
                    f"another {other[:30]!r}": (_rename(key, field, other), general != "<index>")
                    for other in NAMES[general.strip("<>")]
                    if other != field
                }
            yield Place(key, shown, changes)

    def _of_member(self, key, pattern, kind, sort):
        held = {"string": self.client.get, "zset": lambda key: self.client.zrange(key, 0, 0)[0],
                "list": lambda key: self.client.lindex(key, 0), "set": self.client.srandmember}[kind](key)  # fmt: skip
        changes = {}
        for damage in damages(sort, held, gradient=self.gradient):
            # Whatever is a member more, instead of one, is one that nobody wrote.
            changes[damage.name] = (_set_member(kind, key, held, damage.value), damage.fits)
        return Place(key, pattern, changes)


def _blob_of(key):
    """Returns the id of the blob of parameters that a key is a part of; an empty text if it is another key."""
    return key.split(b":")[-2] if b":object:" in key or b":partition:" in key else b""


def pattern_of(name):
    """Returns how stored.py names a key.

    Raises:
        AssertionError: it does not have that key.
    """
    if name in STORED:
        return name
    rest = name.removeprefix(HEAD) if name.startswith(HEAD) else name[name.index("}") + 1 :]
    found = [pattern for pattern in STORED if fnmatch.fnmatchcase(rest, pattern)]
    assert found, f"stored.py has no {name!r}"
    return max(found, key=len)


def _of_key(client, key, form):
    kind = client.type(key)
    words = " ".join(form.values() if isinstance(form, dict) else form[1:]).split()
    hint = all(word.endswith("~") or word == "name" for word in words)

    def replace(write):
        def change(client):
            client.delete(key)
            write(client)

        return change

    others = {
        b"list": lambda client: client.rpush(key, "x"),
        b"string": lambda client: client.set(key, "x"),
        b"hash": lambda client: client.hset(key, "name", "somebody"),
        b"set": lambda client: client.sadd(key, "x"),
        b"zset": lambda client: client.zadd(key, {"x": 1}),
        b"stream": lambda client: client.xadd(key, {"x": "x"}),
    }
    found = {f"a {other.decode()}": (replace(write), hint) for other, write in others.items() if other != kind}
    # It may have been evicted, or never have been there.
    return {**found, "missing": (replace(lambda _: None), True)}


def _set_field(key, field, damage):
    if damage.value is None:
        return lambda client: client.hdel(key, field)
    return lambda client: client.hset(key, field, damage.value)


def _rename(key, field, other):
    return lambda client: client.hset(key, other, client.hget(key, field))


def _set_member(kind, key, held, value):
    if value is None:
        return lambda client: client.delete(key)
    return {
        "string": lambda client: client.set(key, value),
        "zset": lambda client: client.zadd(key, {value: client.zscore(key, held)}),
        "list": lambda client: client.lset(key, 0, value),
        "set": lambda client: client.sadd(key, value),
    }[kind]


class Rounds(World):
    """An accumulator with two gradients in its round, and two in one that was taken and not acknowledged."""

    damaged = ":sums|:buffered|:inline|:part:*|:partition:*|:taken:*"

    def __init__(self, client, kind, storage, **options):
        self.kind, self.schema, of_kind, self._gradient, self.gradient = KINDS[kind]
        self._options = {**of_kind, **STORAGES[storage], **options}
        super().__init__(client)

    def open(self, **options):
        return self.kind(*self.schema, "w", **{"redis": self.where, "worker": "ann", **self._options, **options})

    def apply(self, acc, **options):
        return acc.apply_grad(*self._gradient, **{"local_step": 9, **options})

    def _build(self):
        with self.open() as acc:
            for step in (0, 1):
                for _ in range(2):
                    self.apply(acc, local_step=step)
                if step == 0:
                    _take_and_fail(acc, 2)


def _take_and_fail(acc, number):
    with contextlib.suppress(ZeroDivisionError), acc.take(number, timeout=10):
        raise ZeroDivisionError


class Weighted(Rounds):
    """The same with weights, staleness and a quorum, and what takers, a crew, reducers and others leave."""

    damaged = "*"

    def __init__(self, client, kind, storage):
        late = redisacc.Staleness(2, weight="constant" if kind == "tree" else "inverse_sqrt")
        options = {"staleness": late, "order": "worker", "worker": "worker 3"}
        if kind != "tree":
            options["mean"] = Mean(by="count")
        super().__init__(client, kind, storage, **options)

    def apply(self, acc, **options):
        return super().apply(acc, **{"metrics": {"loss": 0.5}, **options})

    def _build(self):
        client, now = self.client, int(time.time() * 1000)
        # Whose sums depend on the order, but for those of trees with integers, which weigh 1.
        of = {"worker 3": 2.5, "worker 10": 1e8, "worker 2": 3.0}
        with contextlib.ExitStack() as stack:
            for step in range(3):
                for name, weight in of.items():
                    acc = stack.enter_context(self.open(worker=name))
                    weighs = {} if self.kind is redisacc.TreeAccumulator else {"weight": weight}
                    self.apply(acc, local_step=step, **weighs)
                if step == 0:
                    acc.take_grad(3)
                elif step == 1:
                    _take_and_fail(acc, 3)
            acc.set_quorum(least=2, most=3, grace=0.5)
        client.hset(HEAD, mapping={"losses": "1", "wanted": "9", "wanted_weight": "9.5", "grace_count": "2"})
        client.hset(HEAD, mapping={"grace_began_ms": "0", "grace_weight": "5.0"})
        client.zadd(f"{HEAD}:queue", {"token": 1})
        # A taker that died, and that the others do not wait for.
        client.hset(f"{HEAD}:takers", "token", f"9*2.5 {now - 1} chief")
        client.lpush(f"{HEAD}:recovered", f"old token {now} chief")
        crew = {"chief": f"one {now + 600_000} x.1.1 ann:1", "worker 0": f"two {now} x.1.2 bob:2"}
        client.hset(f"{HEAD}:crew", mapping=crew)
        client.zadd(f"{HEAD}:attempts", {"other-1-1 2": now + 600_000})
        client.set(f"{HEAD}:compacting", "token")
        client.set(f"{HEAD}:place:other-1", "1")
        lease = {"holder": "r", "who": "host:1", "stored": 1, "late": 0}
        client.hset(f"{HEAD}:reducer", mapping=lease)
        client.set(f"{HEAD}:sum:{'0' * 32}:0", "part")
        client.set(f"{HEAD}:squares:{'0' * 32}:0", "1.0")


def weights(step):
    """Returns a version of a tree, which differs from the one before in a leaf and in two rows of two others."""
    table, used = np.zeros((50, 4)), np.zeros(32, bool)
    table[[1, 7]], used[2] = step, step % 2
    # No other length of a leaf fills as many multiples of 16 bytes.
    return {"table": table, "used": used, "dense": np.full(8, step, np.float32)}


class Published(World):
    """Parameters of three versions: rows of a table and of booleans, a leaf, a state, and claims of workers."""

    damaged = ":parameters*"
    # Blobs of rows begin with those of the table, and all end with a boolean.
    gradient = Gradient((1, 7), 49, booleans=True)

    def __init__(self, client, **options):
        self._options = options
        super().__init__(client)

    def open(self, **options):
        return redisacc.Parameters("w", **{"redis": self.where, "publisher": "chief", **self._options, **options})

    def publish(self, handle, step, **options):
        """Publishes a version."""
        handle.publish(weights(step), step, state={"momentum": np.zeros(4), "on": np.ones(32, bool)}, **options)

    def _build(self):
        client, now = self.client, int(time.time() * 1000)
        with self.open() as parameters:
            self.publish(parameters, 0)
            for step in (1, 2):
                self.publish(parameters, step, changed={"table": [1, 7], "used": [2]})
        client.zadd(f"{HEAD}:parameters:attempts", {"other-1-full 2": now + 600_000})
        client.set(f"{HEAD}:parameters:deleted", "0" * 32)
        client.hset(f"{HEAD}:parameters:claims", "worker 0", f"7 {'0' * 32} {now} elsewhere.1.1")


class Trained(World):
    """An optimizer has made two versions, of dense leaves and a table. A gradient of the next step is there."""

    damaged = ":parameters*"
    # Of the table, in the last step.
    gradient = Gradient((1, 50), 99)

    def lead(self):
        """Opens a chief."""
        tree = {"a": np.ones((100, 5), np.float32), "b": np.zeros(3), "t": np.ones((100, 2), np.float32)}
        optimizer = redisacc.optim.AdamW(0.1, weight_decay=0.5, no_decay=["b"])
        options = {"redis": self.where, "optimizer": optimizer, "patience": 1.0}
        return redisacc.Chief("w", tree, workers=1, accumulator={"sparse": ["t"]}, **options)

    def work(self, until):
        """Applies gradients until one of the step is there."""
        with redisacc.Worker("w", number=0, redis=self.where, patience=1.0) as worker:
            for step, tree in worker.steps():
                rows = [step, 50], np.ones((2, 2), np.float32)
                worker.apply({**tree, "t": rows}, metrics={"loss": 0.5})
                if step == until:
                    return

    def open(self, **options):
        return redisacc.Parameters("w", **{"redis": self.where, "create": False, **options})

    def _build(self):
        with self.lead() as chief:
            crew = threading.Thread(target=self.work, args=(2,))
            crew.start()
            for step in chief.updates():
                if step == 2:
                    break
            crew.join()


# Name → what makes it. Each kind and each storage is in one of them, and those of `make check` have the others.
WORLDS = {
    "published": Published,
    "published bfloat16 in partitions": lambda client: Published(client, encoding="bfloat16", partitions=2),
    "trained": Trained,
    **{
        f"weighted {kind} {storage}": lambda client, k=kind, s=storage: Weighted(client, k, s)
        for kind, storage in (("sparse", "in place"), ("tree", "parts"), ("dense", "partitions"))
    },
    **{
        f"{kind} {storage}": lambda client, k=kind, s=storage: Rounds(client, k, s)
        for kind in KINDS
        for storage in STORAGES
        if (storage == "in place") <= (kind in ("dense", "sparse", "unbounded", "integers", "tree"))
    },
}
