"""Forks a process for each line it reads: one actor of the chaos, which may be killed or stopped at any moment.

python actor.py DIRECTORY, then lines of JSON: {"role", "server", "min_replicas", "name", "kind", "first", "seed",
"are_large", "journal"}. Answers each with the actor's process id, which is also the id of a process group: the actor
and everything that it forks.

| role | what it does |
| --- | --- |
| `worker` | applies gradients, one after the other |
| `threads` | two threads apply and a third one takes, all with the same handle |
| `forks` | applies in a thread, and meanwhile forks processes that apply with the handle that they inherit |
| `taker` | takes rounds with `take`, and recovers those of a killed process of its name, or sometimes of anybody |
| `grad_taker` | the same with `take_indexed_slices_grad`, or `take_grad` of a tree |
| `reducer` | adds up beside the server what the others upload |
"""

import datetime
import itertools
import json
import os
import random
import signal
import sys
import threading
import time
import traceback
from functools import partial
from pathlib import Path

import numpy as np
import redis
import redis.cluster
from chaos.journal import Journal

import redisacc
from redisacc._clock import durations

NAME = "chaos"
# Elements of a row. Every gradient holds row 0 and a row that no other gradient has.
ROW = 4
# Elements of a leaf that travels encoded: a block of int8; or so many blocks that gradients have several parts, are
# announced, and are left to reducers.
CODED, MANY_CODED = 256, 600 * 256
# Enough for some buffered gradients; beyond that, they are compacted.
BUFFER_LIMIT, LARGE_BUFFER_LIMIT = 16_000, 16_000_000
ENCODINGS = ["float32", "bfloat16", "int8"]
# The indices of an actor: from its first one. Each process that it forks has some of its own.
STRIDE = 10_000_000
CHILD_STRIDE = 10_000
# Indices are announced in the journal in blocks.
BLOCK = 20
# A round of this age may be recovered although its taker may only have been stopped.
ROBBED_AFTER = datetime.timedelta(seconds=1.5)
NEVER = datetime.datetime.min.replace(tzinfo=datetime.UTC)


KINDS = ("sparse", "tree")


def tree(*, are_large):
    """Returns a sparse leaf like the sparse accumulator, and dense ones.

    Only gradients with an even index have one of them, and one travels encoded.
    """
    return {
        "rows": redisacc.Sparse("float64", (None, ROW)),
        "dense": [("float64", (2,)), ("float32", ())],
        "even": ("float64", ()),
        "coded": ("float32", (MANY_CODED if are_large else CODED,)),
    }


def connected(server):
    """Returns what `redis=` is to be: a URL, or a client of a cluster that reaches each node through a proxy.

    Args:
        server: {"url"}; or {"ports", "proxies"}: ports of some nodes, and the file with the proxy's port of each node.
    """
    if "url" in server:
        return server["url"]
    proxies = Path(server["proxies"])
    known = {}

    def by_proxy(address):
        host, port = address
        if str(port) not in known:
            # Nodes are added.
            known.update(json.loads(proxies.read_text()))
        return host, known[str(port)]

    nodes = [redis.cluster.ClusterNode(*by_proxy(("127.0.0.1", port))) for port in server["ports"]]
    return redis.RedisCluster(startup_nodes=nodes, address_remap=by_proxy, socket_timeout=2)


def opened(
    where,
    worker,
    kind,
    *,
    are_large,
    in_place=None,
    inline=None,
    encoding=None,
    min_replicas=0,
    partitions=None,
):
    """Opens the accumulator of a run, which is of one of KINDS. The first one to open it decides about partitions."""
    options = {
        "reduction_type": "SUM",
        "redis": where,
        "min_replicas": min_replicas,
        "worker": worker,
        "limits": redisacc.Limits(in_place, LARGE_BUFFER_LIMIT if are_large else BUFFER_LIMIT, inline),
        "partitions": partitions,
        # A worker learns the step from the reply to its last gradient, so it is often late.
        "staleness": redisacc.Staleness(2),
    }
    if kind == "tree":
        shapes = tree(are_large=are_large)
        return redisacc.TreeAccumulator(shapes, NAME, mean=redisacc.Mean(missing="skip"), encoding=encoding, **options)
    return redisacc.SparseConditionalAccumulator("float64", [None, ROW], NAME, **options)


def gradient(kind, index, *, are_large):
    """Returns the arguments that apply the gradient of an index, which differs from all others."""
    indices, values = [0, index], np.array([[1.0] * ROW, [index + 0.5] * ROW])
    if kind == "sparse":
        return indices, values
    even = None if index % 2 else float(index)
    coded = np.full(MANY_CODED if are_large else CODED, coded_element(index), np.float32)
    return ({"rows": (indices, values), "dense": [[1.0, index], 1], "even": even, "coded": coded},)


def weight_of(index):
    """Returns the weight with which the gradient of an index is applied."""
    return 2.0 ** (index % 3 - 1)


def coded_element(index):
    """Returns each element of the leaf that travels encoded: a number that every encoding keeps."""
    return 127.0 * 2 ** (index % 2)


def indices_of(taken, total_weight=None):
    """Returns the indices of the gradients in a round, after checking its sums.

    Args:
        taken: the sum of the gradients; None if all of them are lost.
        total_weight: what the round says that their weights add up to; None: it is not known.
    """
    if taken is None:
        assert total_weight == 0, f"gradients that are lost are counted as {total_weight}"
        return []
    slices = taken if isinstance(taken, redisacc.IndexedSlices) else taken["rows"]
    indices, values = slices.indices, slices.values
    assert indices[0] == 0, f"row 0 is missing: {indices[:10]}"
    number = len(indices) - 1
    listed = list(map(int, indices[1:]))
    weights = values[1:, 0] / (indices[1:] + 0.5)
    expected = np.array([weight_of(index) for index in listed])
    wrong = (weights != expected) | (values[1:] != values[1:, :1]).any(axis=1)
    assert not wrong.any(), f"the gradients {indices[1:][wrong][:10]} are {values[1:][wrong][:10]}"
    total = float(weights.sum())
    assert (values[0] == total).all(), f"gradients of weight {total} sum to {values[0]} in row 0"
    assert total_weight in (None, total), f"gradients of weight {total} are counted as {total_weight}"
    weighted = list(zip(listed, weights.tolist(), strict=True))
    if slices is not taken:
        # Multiples of 1/8 below 2**50, whose sums are exact.
        found = [taken["dense"][0].tolist(), float(taken["dense"][1])]
        by_index = sum(index * weight for index, weight in weighted)
        assert found == [[total, by_index], total], f"{number} gradients sum to {found} in the dense leaves"
        even = [index * weight for index, weight in weighted if index % 2 == 0]
        assert (taken["even"] is None) == (not even), f"even is {taken['even']} of {even[:10]}"
        assert not even or taken["even"] == sum(even), f"even sums to {taken['even']}, not {sum(even)}"
        coded = sum(coded_element(index) * weight for index, weight in weighted)
        assert (taken["coded"] == coded).all(), f"coded sums to {taken['coded'][:3]}, not {coded}"
    return listed


def finished(operate):
    """Returns the outcome of an operation, however often the server stops answering."""
    while True:
        try:
            return operate()
        except redisacc.OutcomeUnknownError as error:
            operate = error.settle


class Actor:
    """One process.

    Args:
        name: under which it applies and takes.
        kind: what the accumulator is.
        server: where it reaches the server, for `connected`.
        min_replicas: how many replicas have to confirm what it does.
        journal: what it writes.
        stop: a file that exists when the run is over.
        seed: of its random choices.
        are_large: whether gradients are.
    """

    def __init__(
        self,
        *,
        name,
        kind,
        server,
        min_replicas,
        journal,
        stop,
        seed,
        are_large,
    ):
        self.name = name
        self._kind = kind
        self._server = server
        self._min_replicas = min_replicas
        # Only a replica that takes over may have less than its master had, and only of what nobody relies on.
        self._losses = (redisacc.DataLossError,) if min_replicas else ()
        self._journal = journal
        self._stop = stop
        self._random = random.Random(seed)
        self._are_large = are_large
        # Gradients are announced and uploaded in parts, as large ones are.
        self._inline = 0 if are_large else self._random.choice([None, 0])
        # An impatient actor counts gradients that no replica has, some of which then get lost.
        durations.replication = self._random.choice([0.1, 5.0])
        # Takers try again soon after a reducer was late, because here one always is.
        durations.without_reducer = durations.longest_without_reducer = 0.1

    @property
    def over(self):
        return self._stop.exists()

    def open(self, in_place=10**9, encoding=None):
        while True:
            try:
                return opened(
                    connected(self._server),
                    self.name,
                    self._kind,
                    are_large=self._are_large,
                    in_place=in_place,
                    inline=self._inline,
                    encoding=encoding,
                    min_replicas=self._min_replicas,
                )
            except (redisacc.ServerUnavailableError, redis.RedisError):
                continue

    def play(self, role, first):
        """Does what the role says until the run is over."""
        match role:
            case "worker":
                self._apply(self._open_for_applying(), first)
            case "threads":
                self._use_threads(first)
            case "forks":
                self._fork(first)
            case "taker" | "grad_taker":
                self._take(self.open(), role)
            case "reducer":
                self._reduce()
            case _:
                raise ValueError(role)

    def _open_for_applying(self):
        # In place, buffered, and in both ways within one round.
        limit = 0 if self._are_large else self._random.choice([0, 10**9])
        return self.open(limit, encoding=self._random.choice(ENCODINGS))

    def _apply(self, acc, first, number=STRIDE):
        step = 0
        for index in range(first, first + number):
            if index % BLOCK == first % BLOCK:
                if self.over:
                    return
                self._journal.note(f"begin {index} {index + BLOCK - 1}")
            try:
                arguments, weight = gradient(self._kind, index, are_large=self._are_large), weight_of(index)
                result = finished(partial(acc.apply_grad, *arguments, local_step=step, weight=weight))
            except (redisacc.ServerUnavailableError, redisacc.AccumulatorFullError):
                self._journal.note(f"dropped {index}")
                continue
            except redisacc.NotReplicatedError:
                # It is counted, unless the replica takes over before it has it.
                self._journal.note("unconfirmed")
                continue
            except self._losses:
                self._journal.note("loss")
                self._journal.note(f"dropped {index}")
                continue
            if result:
                self._journal.note(f"applied {index} {result.global_step}")
            else:
                self._journal.note(f"dropped {index}")
            step = result.global_step

    def _use_threads(self, first):
        acc = self._open_for_applying()
        threads = [
            self._thread(partial(self._apply, acc, first)),
            self._thread(partial(self._apply, acc, first + STRIDE // 2)),
            self._thread(partial(self._take, acc, "taker")),
        ]
        for thread in threads:
            thread.join()

    def _thread(self, job):
        def run():
            with ExitsOnError(self._journal):
                job()

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    def _fork(self, first):
        acc = self._open_for_applying()
        thread = self._thread(partial(self._apply, acc, first, STRIDE // 2))
        for number in itertools.count():
            if self.over:
                break
            pid = os.fork()
            if pid == 0:
                with ExitsOnError(self._journal):
                    self._apply(acc, first + STRIDE // 2 + number * CHILD_STRIDE, self._random.choice([20, 200]))
                os._exit(0)
            time.sleep(self._random.uniform(0.05, 0.5))
            _, status = os.waitpid(pid, 0)
            assert status == 0, status
        thread.join()

    def _reduce(self):
        reducer = redisacc.Reducer(NAME, redis=connected(self._server))
        thread = self._thread(reducer.run)
        while not self.over:
            time.sleep(0.05)
        reducer.close()
        thread.join()

    def _take(self, acc, role):
        while not self.over:
            self._recover(acc)
            # A reducer learns once a second how many gradients takes require.
            required = self._random.choice([4] * 9 + [30] if self._are_large else [1, 30, 300])
            options = {"timeout": self._random.choice([0.5, 2.0, 5.0])}
            if self._random.random() < 0.2:
                options["min_weight"] = self._random.choice([0.5, 4.0, 100.0])
            if self._random.random() < 0.3:
                options |= {
                    "most": self._random.choice([None, 300, 1000]),
                    "grace": self._random.choice([0.01, 0.3, 2]),
                }
            try:
                if self._random.random() < 0.3:
                    # Takes of others that wait for the quorum follow this change.
                    change = {"least": required, "most": None, "grace": None, **options}
                    options = {name: change.pop(name) for name in ("timeout", "min_weight") if name in change}
                    finished(partial(acc.set_quorum, **change))
                    self._journal.note("configured")
                    required = None
                if role == "grad_taker":
                    self._take_grad(acc, required, options)
                else:
                    block = acc.take(required, **options)
                    self._use(block.__enter__(), block)
            except (redisacc.TakeTimeoutError, redisacc.ServerUnavailableError):
                # If the server was silent, the round may have been granted all the same: then it is recovered.
                continue
            except redisacc.NotReplicatedError:
                # The round stays unacknowledged.
                continue
            except self._losses as loss:
                self._note_loss(loss)
            except redisacc.ConflictError:
                # This process was stopped, and taken for dead.
                self._journal.note("robbed")

    def _take_grad(self, acc, required, options):
        self._journal.note("taking")
        try:
            take = acc.take_grad if self._kind == "tree" else acc.take_indexed_slices_grad
            indices = indices_of(finished(partial(take, required, **options)))
            self._journal.note_round(None, len(indices), indices)
        finally:
            self._journal.note("kept")

    def _note_loss(self, loss):
        self._journal.note("loss")
        if loss.part is not None:
            assert f":{loss.gradient}:" in loss.part, f"gradient {loss.gradient} has no part {loss.part}"
            self._journal.note("part")

    def _recover(self, acc, *, skip_lost=False):
        """Rounds that were granted to a killed taker of this name, and sometimes old ones of anybody."""
        try:
            info = acc.info()
            of_anybody = info.read_at - ROBBED_AFTER if self._random.random() < 0.2 else NEVER
            for one in info.unacknowledged:
                if one.taker != self.name and one.granted_at >= of_anybody:
                    continue
                block = acc.recover(one.token, skip_lost=skip_lost)
                taken = block.__enter__()
                if taken is not None:
                    if taken.num_accumulated < one.num_accumulated:
                        assert skip_lost
                        self._journal.note(f"lost {taken.global_step} {one.num_accumulated - taken.num_accumulated}")
                    self._use(taken, block)
                else:
                    block.__exit__(None, None, None)
        except (redisacc.ServerUnavailableError, redisacc.NotReplicatedError):
            return
        except self._losses as loss:
            self._note_loss(loss)
            if loss.part is not None:
                # It is listed under another token now.
                self._recover(acc, skip_lost=True)
        except redisacc.ConflictError:
            self._journal.note("robbed")

    def _use(self, taken, block):
        indices = indices_of(taken.gradient, taken.total_weight)
        self._journal.note_round(taken.global_step, taken.num_accumulated, indices)
        if self._random.random() < 0.3:
            # The round is in use: a process that is killed here leaves a round that is handed out again.
            time.sleep(2 * self._random.random())
        finished(lambda: block.__exit__(None, None, None))


class ExitsOnError:
    """Writes an error of its block into the journal, and ends the process."""

    def __init__(self, journal):
        self._journal = journal

    def __enter__(self):
        pass

    def __exit__(self, _type, error, _traceback):
        if error is not None:
            self._journal.note("wrong " + "".join(traceback.format_exception(error)).replace("\n", " | "))
            os._exit(1)


def main():
    directory = Path(sys.argv[1])
    # The parent never waits for its children.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        task = json.loads(line)
        pid = os.fork()
        if pid == 0:
            os.setpgid(0, 0)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            journal = Journal(directory / task["journal"])
            with ExitsOnError(journal):
                actor = Actor(
                    name=task["name"],
                    kind=task["kind"],
                    server=task["server"],
                    min_replicas=task["min_replicas"],
                    journal=journal,
                    stop=directory / "stop",
                    seed=task["seed"],
                    are_large=task["are_large"],
                )
                actor.play(task["role"], task["first"])
                journal.note("end")
            os._exit(0)
        os.setpgid(pid, pid)
        print(pid, flush=True)


if __name__ == "__main__":
    main()
