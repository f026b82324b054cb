"""Every script runs on every server family, and every kind of key is touched there, in `make test`, too."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import redis
from support.planting import trees
from support.training_options import grouped

import redisacc
from redisacc._admin import garbage
from redisacc._format import buffered as buffered_format
from redisacc._format.keys import ParameterKeys
from redisacc._protocol.leases.forgetting import forget_worker
from redisacc._protocol.scripts.accumulators import Scripts
from redisacc._protocol.scripts.parameters import ParameterScripts
from redisacc._protocol.scripts.reducers import ReducerScripts
from redisacc._redis import script_loader
from redisacc._redis.connect import connect
from redisacc._redis.transport import Hint, Transport

# The suffix of a key after the record's name, without tokens, ids and numbers.
KINDS = {
    *("", "sessions", "queue", "takers", "taken", "recovered", "compacting", "crew", "reducer", "part", "staged"),
    "attempts",
    *("sums", "buffered", "inline", "workers"),
    *("taken:sums", "taken:buffered", "taken:inline", "taken:workers"),
    *("parameters", "parameters:object", "parameters:attempts", "parameters:guard", "parameters:history"),
}


class Recorder:
    """The names of the scripts and the kinds of the keys that a process has sent."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.scripts: set[str] = set()
        self.kinds: set[str] = set()
        run, prepare, call = Transport.run_and_read, Transport.prepare, Transport.call

        def recorded_run(transport: Transport, script: Any, keys: Any, args: Any, **options: Any) -> Any:
            self._record(script, keys)
            for command in options.get("before", ()):
                if isinstance(command, Hint) and command.script is not None:
                    self._record(command.script, command[3 : 3 + int(command[2])])
            return run(transport, script, keys, args, **options)

        def recorded_prepare(transport: Transport, script: Any, keys: Any, args: Any, **options: Any) -> Any:
            self._record(script, keys)
            return prepare(transport, script, keys, args, **options)

        def recorded_call(transport: Transport, *command: Any, **options: Any) -> Any:
            self._record(None, command[1:2])
            return call(transport, *command, **options)

        monkeypatch.setattr(Transport, "run_and_read", recorded_run)
        monkeypatch.setattr(Transport, "prepare", recorded_prepare)
        monkeypatch.setattr(Transport, "call", recorded_call)

    def _record(self, script: Any, keys: Any) -> None:
        if script is not None:
            self.scripts.add(script.name)
        for key in keys:
            match = re.fullmatch(r"redisacc:\{every\}(?::(.+))?", str(key))
            if match is not None:
                words = (match[1] or "").split(":")
                if words[0] == "parameters":
                    self.kinds.add(":".join(words[:2]))
                else:
                    self.kinds.add(f"taken:{words[-1]}" if len(words) > 1 and words[0] == "taken" else words[0])


class Died(Exception):
    """Raised in place of a kill."""


@pytest.mark.every_server
def test_every_script_and_every_kind_of_key(
    real_client: redis.Redis, monkeypatch: pytest.MonkeyPatch, background: Callable[..., Any]
) -> None:
    recorder = Recorder(monkeypatch)

    def opened(in_place_limit: int) -> redisacc.ConditionalAccumulator:
        return redisacc.ConditionalAccumulator(
            *("float32", [4], "every"),
            reduction_type="SUM",
            redis=real_client,
            limits=redisacc.Limits(in_place=in_place_limit, buffer=48),
        )

    acc, buffering = opened(10**9), opened(0)
    # A take that must wait, and leaves.
    with pytest.raises(redisacc.TakeTimeoutError):
        acc.take_grad(1, timeout=0)
    # Gradients stored in every way, of which the last has the others compacted.
    assert acc.apply_grad(np.full(4, 1.0)).num_accumulated == 1
    for value in (2.0, 4.0, 8.0):
        assert buffering.apply_grad(np.full(4, value))
    with monkeypatch.context() as patch:
        patch.setattr(buffered_format, "INLINE_BYTES", 0)
        patch.setattr(buffered_format, "ANNOUNCED_BYTES", 0)
        assert buffering.apply_grad(np.full(4, 16.0)).num_accumulated == 5
        assert buffering.apply_grad(np.full(4, 32.0)).num_accumulated == 6
    # A refusal of a copy, when another was lost.
    with monkeypatch.context() as patch:
        patch.setattr(Scripts, "apply", refuse_after_a_loss)
        patch.setattr(Scripts, "buffer", refuse_after_a_loss)
        with pytest.raises(redisacc.InvalidArgumentError):
            acc.apply_grad(np.ones(4))
    # A round whose taker died.
    with pytest.raises(Died), acc.take(6):
        raise Died
    with acc.recover() as found:
        assert found is not None
        assert found.gradient.tolist() == [63.0] * 4
    acc.set_global_step(7)
    acc.set_quorum(least=2)
    reducer = ReducerScripts(connect(real_client), acc._keys, None)
    assert reducer.hold_reducer(holder="h", who="me", stored=0, late=0, sums="", lease_ms=60_000) is None
    assert reducer.release_reducer(holder="h")
    info = acc.info()
    for known in info.known_workers:
        assert forget_worker(connect(real_client), acc._keys, info.incarnation, known.name)
    # Garbage that only a bug or a person could leave.
    real_client.set("redisacc:{every}:part:nobodys-1:0", b"x")
    (leftover,) = garbage.find_garbage(connect(real_client))
    assert garbage.remove_garbage(connect(real_client), leftover) == 1
    acc.delete()
    # Gradients whose parts lie in other slots.
    with monkeypatch.context() as patch:
        patch.setattr(buffered_format, "INLINE_BYTES", 0)
        spread = redisacc.ConditionalAccumulator(
            "float32", [40], "every", redis=real_client, limits=redisacc.Limits(in_place=0), partitions=2
        )
        assert spread.apply_grad(np.ones(40))
        assert spread.take_grad(1).tolist() == [1.0] * 40
        spread.delete()
    # An upload that begins before its gradient is complete.
    leaves = redisacc.TreeAccumulator(
        {"w": ("float32", (4,))}, "every", redis=real_client, limits=redisacc.Limits(in_place=0, inline=0)
    )
    upload = leaves._begin(0)
    assert upload is not None
    upload.put(0, np.ones(4, np.float32))
    assert leaves._commit(upload, {"w": np.ones(4)}, 1.0, None, "")
    leaves.delete()
    parameters = redisacc.Parameters("every", redis=real_client)
    for step, tree in enumerate(trees()):
        parameters.publish(tree, step, changed={"table": [0, 2]}, state=[np.zeros(3)])
        assert parameters.wait(after=step - 1, timeout=20)[0] == step
    parameters.finish()
    parameters.delete()
    parameters = redisacc.Parameters("every", redis=real_client, partitions=2)
    for step, tree in enumerate(trees()):
        parameters.publish(tree, step, changed={"table": [0, 2]}, state=[np.zeros(3)])
        assert parameters.wait(after=step - 1, timeout=20)[0] == step
    parameters.delete()
    with redisacc.Worker("every", redis=real_client) as worker:
        assert worker.number == 0
    # A training with an optimiser, in one slot and in partitions.
    for partitions in (None, 2):
        update(real_client, background, partitions)
    # A worker that has parameters which the server has lost.
    lost = ParameterKeys("every")
    ParameterScripts(connect(real_client), lost).claim(place="worker 0", incarnation="x", step=1)
    assert ParameterScripts(connect(real_client), lost).give_up(incarnation="x", version="v")
    real_client.delete(f"{lost.record}:claims")
    assert recorder.scripts == set(script_loader.names())
    assert recorder.kinds >= KINDS


def update(client: redis.Redis, background: Callable[..., Any], partitions: int | None) -> None:
    """Makes two updates of parameters that have the same partitions as their gradients."""

    def work() -> None:
        with redisacc.Worker("every", redis=client) as worker:
            for _, parameters in worker.steps():
                worker.apply({"w": parameters["w"], "table": ([3, 7], parameters["table"][[3, 7]])})

    weights = {"w": np.ones(40, np.float32), "table": np.ones((50, 2))}
    optimizer = redisacc.optim.SGD(0.5, momentum=0.5, clip_norm=3.0)
    options: dict[str, Any] = {"workers": 1, "sparse": ["table"], "partitions": partitions, "redis": client}
    with redisacc.Chief("every", weights, optimizer=optimizer, **grouped(options)) as chief:
        worker = background(work)
        assert list(chief.updates(until=2)) == [1, 2]
        worker.result(30)
        found = chief.latest()[1]
        assert np.unique(found["w"]).size == 1
        assert {*(found["table"] != 1).nonzero()[0]} == {3, 7}
        chief.delete()


def refuse_after_a_loss(scripts: Scripts, *_: Any, **__: Any) -> None:
    scripts._transport.losses.count += 1
    raise redisacc.InvalidArgumentError("refused")
