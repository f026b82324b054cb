"""Servers whose replies are well-formed and of the wrong form: a typed error in every call and every command.

Each case is a call, a Redis command that it sends, and a form that no such reply has. A forger passes on everything
else, so that the call gets that far.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from click.testing import CliRunner
from prometheus_client import generate_latest
from support.forging import FORMS, Forger, forger
from support.planting import Planted, apply_rows, open_kind
from support.selection import ONE_NODE, thorough

import redisacc
import redisacc.asyncio
import redisacc.cli.dashboard
import redisacc.cli.export
from redisacc import raw_ops
from redisacc._checkpoints.file import Checkpoint, write_file
from redisacc._dashboard.page_data import parse_query
from redisacc.cli import main

pytestmark = [pytest.mark.forges, pytest.mark.servers("valkey"), pytest.mark.servers(*ONE_NODE)]

# Seconds that a call tries to reach a server that answers something that cannot be a reply.
SHORT = 0.2
EXIT_CODES = (0, 1, 2, 3, 4, 5, 6)

COMMANDS = {
    "apply": ["apply", "w", "gradient.npz"],
    "checkpoint": ["checkpoint", "w", "out.safetensors"],
    "dashboard": ["dashboard", "--port", "0"],
    "doctor": ["doctor"],
    "export": ["export", "--port", "0"],
    "finish": ["finish", "w"],
    "forget-worker": ["forget-worker", "w", "ann"],
    "gc": ["gc", "--yes"],
    "load-scripts": ["load-scripts"],
    "ls": ["ls", "--private"],
    "recover": ["recover", "w", "--output", "out.npz"],
    "reduce": ["reduce"],
    "restore": ["restore", "r", "saved.safetensors", "--force"],
    "rm": ["rm", "w", "--yes"],
    "set": ["set", "w", "least=2"],
    "set-step": ["set-step", "w", "9", "--yes"],
    "show": ["show", "w"],
    "show rows": ["show", "w", "--top", "2"],
    "tail": ["tail", "w", "--timeout", "0"],
    "take": ["take", "w", "1", "--timeout", "0.05", "--output", "out.npz"],
    "watch": ["watch", "-n", "1"],
}
# These send nothing, or start a server of their own.
OFFLINE = {"acl", "completion", "demo", "run", "server"}

ONES = np.ones((100, 2), np.float32)


def on(kind: str, act: Callable[[Any], object], **options: Any) -> Callable[[Any], object]:
    """Returns a call that opens the planted accumulator and does something with it."""

    def call(url: str) -> object:
        with open_kind(kind, url, worker="eve", **options) as acc:
            return act(acc)

    return call


def dense(act: Callable[[Any], object], **options: Any) -> Callable[[Any], object]:
    def call(url: str) -> object:
        with redisacc.ConditionalAccumulator("float32", [3], "d", redis=url, worker="eve", **options) as acc:
            return act(acc)

    return call


def tree(url: str) -> object:
    with redisacc.TreeAccumulator(
        {"d": ("float32", (3,)), "s": redisacc.Sparse("float32", (9, 2))}, "t", redis=url
    ) as acc:
        acc.apply_grad({"d": np.ones(3), "s": (np.array([1]), np.ones((1, 2)))})
        acc.peek()
        return acc.take_grad(1, timeout=1)


def apply_and_take(acc: Any) -> object:
    for _ in range(2):
        acc.apply_grad(np.ones(3), local_step=99)
    acc.peek()
    return acc.take_grad(1, timeout=1)


def recover(acc: Any) -> None:
    with acc.recover():
        pass


def operate(url: str) -> None:
    """Uses TensorFlow's operations, on a handle that is a text."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REDISACC_URL", url)
        handle = raw_ops.ConditionalAccumulator(dtype="float32", shape=[3], shared_name="raw")
        raw_ops.AccumulatorApplyGradient(handle=handle, local_step=0, gradient=np.ones(3, np.float32))
        raw_ops.AccumulatorNumAccumulated(handle=handle)
        raw_ops.AccumulatorSetGlobalStep(handle=handle, new_global_step=3)
        raw_ops.AccumulatorTakeGradient(handle=handle, num_required=1, dtype="float32")


def parameters(act: Callable[[redisacc.Parameters], object], **options: Any) -> Callable[[Any], object]:
    def call(url: str) -> object:
        with redisacc.Parameters("w", redis=url, publisher="eve", **options) as weights:
            return act(weights)

    return call


def publish(weights: redisacc.Parameters) -> None:
    if weights.finished():
        weights.finish(False)
    weights.publish({"table": np.ones((10, 4), np.float32), "bias": np.zeros(3)}, 7, state={"momentum": np.zeros(3)})


def train(url: str) -> None:
    """A chief and a worker, for one step. If one of them fails, so does the other."""
    failed: list[Exception] = []
    with (
        redisacc.Chief("t", {"w": np.zeros(2, np.float32)}, workers=1, redis=url, patience=1) as chief,
        redisacc.Worker("t", number=0, redis=url, patience=1) as worker,
    ):

        def work() -> None:
            try:
                for _, tree in worker.steps():
                    worker.apply(tree)
            except redisacc.RedisAccError as error:
                failed.append(error)
                chief.close()

        thread = threading.Thread(target=work)
        thread.start()
        try:
            for taken in chief.rounds(until=1):
                chief.publish(taken.gradient)
        except BaseException:
            # It would wait for a step that nobody publishes.
            worker.close()
            raise
        finally:
            thread.join()
    for error in failed:
        raise error


def reduce(url: str) -> None:
    with redisacc.Reducer("w", redis=url) as reducer:
        reducer.run()


async def use_loop(url: str) -> None:
    async with redisacc.asyncio.ConditionalAccumulator("float32", [3], "a", redis=url) as acc:
        await acc.apply_grad(np.ones(3, np.float32))
        await acc.info()
        await acc.peek()
        await acc.take_grad(1, timeout=1)


async def use_parameters_on_a_loop(url: str) -> None:
    async with redisacc.asyncio.Parameters("w", redis=url) as weights:
        await weights.latest()


def first_event(acc: Any) -> None:
    with acc.events(timeout=0.0) as events:
        next(iter(events), None)


CALLS: dict[str, Callable[[Any], object]] = {
    "dense": dense(apply_and_take),
    "dense buffered": dense(apply_and_take, limits=redisacc.Limits(in_place=0)),
    "private": lambda url: redisacc.ConditionalAccumulator("float32", [1], redis=url).close(),
    "dense partitions": lambda url: redisacc.ConditionalAccumulator(
        "float32", [3], "p", redis=url, partitions=2, limits=redisacc.Limits(in_place=0)
    ).apply_grad(np.ones(3)),
    "sparse take": on("sparse", lambda acc: acc.take_grad(1, timeout=0.05)),
    "sparse peek": on("sparse", lambda acc: acc.peek()),
    "sparse parts": on("sparse", lambda acc: apply_rows(acc, 4200, 1)),
    "tree": tree,
    "info": on("sparse", lambda acc: acc.info()),
    "num_accumulated": on("sparse", lambda acc: (acc.num_accumulated(), acc.global_step())),
    "set_global_step": on("sparse", lambda acc: acc.set_global_step(9)),
    "wait_for_step": on("sparse", lambda acc: acc.wait_for_step(1, timeout=1)),
    "set_quorum": on("sparse", lambda acc: (acc.set_quorum(least=2), acc.quorum())),
    "settle": on("sparse", lambda acc: acc.settle()),
    "recover": on("sparse", recover),
    "events": on("sparse", first_event),
    "delete": on("sparse", lambda acc: acc.delete()),
    "raw_ops": operate,
    "parameters publish": parameters(publish),
    "parameters partitions": lambda url: publish(redisacc.Parameters("p", redis=url, partitions=2)),
    "parameters latest": parameters(lambda weights: (weights.step(), weights.latest(), weights.is_complete())),
    "parameters state": parameters(lambda weights: weights.latest_state()),
    "parameters wait": parameters(lambda weights: weights.wait(timeout=1)),
    "parameters finished": parameters(lambda weights: weights.finished()),
    "parameters delete": parameters(lambda weights: weights.delete()),
    "training": train,
    "reducer": reduce,
    "asyncio": lambda url: asyncio.run(use_loop(url)),
    "asyncio parameters": lambda url: asyncio.run(use_parameters_on_a_loop(url)),
}


@pytest.fixture
def planted(real_client: Any) -> Planted:
    redisacc.ConditionalAccumulator("float32", [3], "d", redis=real_client).close()
    return Planted(real_client)


@pytest.fixture
def forging(real_server: Any) -> Iterator[Forger]:
    with forger(real_server.port) as found:
        yield found


@pytest.fixture
def run(
    durations: Callable[..., Any], forging: Forger, real_client: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., object]:
    """Runs a call or a command against the forger, and checks how it ends. Returns its error; None if it succeeds."""
    monkeypatch.chdir(tmp_path)
    np.savez("gradient.npz", indices=np.array([1]), values=np.ones((1, 2), np.float32), shape=np.array([100_000, 2]))
    write_file(tmp_path / "saved.safetensors", Checkpoint("w", 1, {"table": ONES}, None))

    def collect_once(port: int, host: str, registry: Any) -> Any:
        generate_latest(registry)
        server = types.SimpleNamespace(server_port=1, shutdown=lambda: None, server_close=lambda: None)
        return server, threading.Thread()

    def show_one_page(server: Any, sockets: Any) -> None:
        async def first() -> None:
            async for _ in server._feed.updates(parse_query({})):
                break

        asyncio.run(first())

    run_reducer = redisacc.Reducer.run

    def run_briefly(reducer: Any) -> None:
        """Calls the reducer, and ends it once it has met the forged reply, or has looked at the accumulator."""
        ended = threading.Event()

        def call() -> None:
            for _ in range(20):
                real_client.publish("redisacc:{w}:calls", "")
                if forging.forged.wait(0.02) or ended.is_set():
                    break
            reducer.close()

        thread = threading.Thread(target=call)
        thread.start()
        try:
            run_reducer(reducer)
        finally:
            ended.set()
            thread.join()

    monkeypatch.setattr("redisacc.cli.export.start_http_server", collect_once)
    monkeypatch.setattr("redisacc.cli.dashboard._Server.run", show_one_page)
    monkeypatch.setattr("redisacc.Reducer.run", run_briefly)

    def one(what: str) -> object:
        url = f"redis://127.0.0.1:{forging.port}"
        with contextlib.ExitStack() as stack:
            if forging.command:
                # Without a forged reply, the call has to succeed, however slow the machine is.
                stack.enter_context(durations(opening=SHORT, confirmation=SHORT, call=SHORT))
            if what in CALLS:
                try:
                    CALLS[what](url)
                except redisacc.RedisAccError as error:
                    return error
                return None
            result = CliRunner().invoke(main, COMMANDS[what], env={"REDISACC_URL": url})
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
        assert result.exit_code in EXIT_CODES
        assert "Traceback" not in result.output
        return result.output if result.exit_code else None

    return one


def cases(
    planted: Planted, forging: Forger, run: Callable[..., object], what: str, *, first: bool
) -> list[tuple[str, int]]:
    """Returns the Redis commands and scripts that a call sends: the last time that it does, or also the first."""
    forging.passes()
    planted.restore()
    assert run(what) is None
    return sorted({(command, at) for command, times in forging.seen.items() for at in (times - 1, 0)[: 1 + first]})


class Failures:
    """Collects how cases fail, so that the first does not hide the others."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self._caplog = caplog
        self._errors: list[Exception] = []

    @contextlib.contextmanager
    def of(self, case: str) -> Iterator[None]:
        try:
            yield
            # A thread or a task that fails is only logged.
            assert not self._caplog.records
        except (Exception, pytest.fail.Exception) as error:
            error.add_note(case)
            self._errors.append(error)
        self._caplog.clear()

    def raise_all(self) -> None:
        if self._errors:
            raise ExceptionGroup("replies that are not refused", self._errors)


@pytest.fixture
def failures(caplog: pytest.LogCaptureFixture) -> Failures:
    caplog.set_level(logging.ERROR)
    return Failures(caplog)


TRIED = [*CALLS, *COMMANDS]


# The other half of the calls get the same wrong reply to everything, below.
@pytest.mark.parametrize("what", thorough(TRIED, usual=TRIED[1::2]))
def test_one_reply_of_another_form_gives_a_typed_error(planted, forging, run, what, everything, failures):
    # Each call begins with another form.
    forms = itertools.islice(itertools.cycle(FORMS), 3 * TRIED.index(what), None)
    for command, at in cases(planted, forging, run, what, first=everything):
        for form in FORMS if everything else [next(forms)]:
            planted.restore()
            forging.forge(command, FORMS[form], at)
            with failures.of(f"{what}: {command} number {at + 1} was answered with {form}"):
                run(what)
    failures.raise_all()


@pytest.mark.slow
@pytest.mark.parametrize("what", thorough(TRIED, usual=TRIED[::2]))
def test_a_server_that_says_the_same_to_everything_gives_a_typed_error(forging, run, what, everything, failures):
    for form in FORMS if everything else [list(FORMS)[TRIED.index(what) % len(FORMS)]]:
        forging.forge("*", FORMS[form])
        with failures.of(f"{what}: everything was answered with {form}"):
            run(what)
    failures.raise_all()


def test_every_command_is_tried():
    commands = main.list_commands(click.Context(main))
    assert {words[0] for words in COMMANDS.values()} | OFFLINE == set(commands)
