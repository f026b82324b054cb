"""The roles: chief and workers, the training in one process, and the comparison of the two."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import redis
from demo_text import settings_for, small_corpus

import redisacc
from redisacc.demo import DemoError, exchange, training
from redisacc.demo.exchange import Settings, WorkerExchange, parameters_digest
from redisacc.demo.processes import train_in_one_process
from redisacc.demo.skipgram import Parameters
from redisacc.demo.training import (
    Accumulators,
    Chief,
    Trained,
    average,
    initial_parameters,
    judge,
    sampler_for,
    tolerance_for,
    train_alone,
    work,
)

CORPUS = small_corpus()
SETTINGS = settings_for(CORPUS)


def ignore(*_: object) -> None:
    pass


# In one process


def oracle(settings: Settings, steps: int) -> tuple[dict[str, list[list[float]]], list[float]]:
    """The training from its definition: lists of Python floats, one pair and one negative at a time."""
    start = initial_parameters(settings)
    tables = {name: getattr(start, name).tolist() for name in ("input", "output", "position")}
    squares = {name: [[0.1] * settings.dim for _ in table] for name, table in tables.items()}
    sampler = sampler_for(settings, CORPUS)
    losses = []
    for step in range(steps):
        found: list[dict[str, dict[int, list[float]]]] = []
        total, pairs = 0.0, 0
        for worker in range(settings.workers):
            batch = sampler.batch(step, worker)
            gradient: dict[str, dict[int, list[float]]] = {"input": {}, "output": {}, "position": {}}
            # Every worker's gradient holds all rows of the dense one.
            gradient["position"] = {k: [0.0] * settings.dim for k in range(2 * settings.window)}

            def add(name: str, row: int, factor: float, values: list[float], into: Any = gradient) -> None:
                old = into[name].get(row, [0.0] * settings.dim)
                into[name][row] = [a + factor * b for a, b in zip(old, values, strict=True)]

            for centre, context, place in zip(batch.centres, batch.contexts, batch.places, strict=True):
                v, p = tables["input"][centre], tables["position"][place]
                hidden = [a * b for a, b in zip(v, p, strict=True)]
                pairs += 1
                targets = [(context, 1.0, 1.0)]
                targets += [(n, -1.0, batch.negative_weight) for n in batch.negatives if n != context]
                for word, sign, weight in targets:
                    u = tables["output"][word]
                    score = sum(a * b for a, b in zip(hidden, u, strict=True))
                    total += weight * math.log1p(math.exp(-sign * score))
                    slope = -sign * weight / (1 + math.exp(sign * score))
                    add("output", word, slope, hidden)
                    add("input", centre, slope, [a * b for a, b in zip(u, p, strict=True)])
                    add("position", place, slope, [a * b for a, b in zip(u, v, strict=True)])
            for n in batch.negatives:
                add("output", n, 0.0, [0.0] * settings.dim)
            found.append(gradient)
        for name, table in tables.items():
            for row in set().union(*(gradient[name] for gradient in found)):
                holders = [gradient[name][row] for gradient in found if row in gradient[name]]
                for k in range(settings.dim):
                    mean = sum(values[k] for values in holders) / len(holders)
                    squares[name][row][k] += mean * mean
                    table[row][k] -= settings.rate * mean / math.sqrt(squares[name][row][k])
        losses.append(total / pairs)
    return tables, losses


def test_three_steps_are_those_of_the_definition() -> None:
    settings = replace(SETTINGS, workers=3, steps=3, dim=4, batch=32, shared_negatives=6)
    tables, losses = oracle(settings, 3)
    seen: list[tuple[int, float, int]] = []
    found = train_alone(settings, CORPUS, lambda *step: seen.append(step))
    for name, table in tables.items():
        assert np.abs(getattr(found.parameters, name) - np.array(table)).max() < 2e-6, name
    assert found.losses == pytest.approx(losses, rel=1e-6)
    assert seen == [(step + 1, found.losses[step], 12) for step in range(3)]
    # The parameters did change.
    moved = np.abs(found.parameters.input - initial_parameters(settings).input)
    assert moved.max() > 0.01


def test_average_divides_a_row_by_those_that_held_it() -> None:
    one = (np.array([0, 1]), np.array([[1.0], [2.0]], "f4"))
    two = (np.array([1, 3]), np.array([[4.0], [6.0]], "f4"))
    three = (np.array([1]), np.array([[6.0]], "f4"))
    indices, rows = average([one, two, three])
    assert indices.tolist() == [0, 1, 3]
    assert rows.tolist() == [[1], [4], [6]]
    assert rows.dtype == np.float32


def test_a_process_of_its_own_trains_the_same() -> None:
    seen: list[tuple[int, float, int]] = []
    elsewhere = train_in_one_process(SETTINGS, CORPUS, lambda *step: seen.append(step))
    here = train_alone(SETTINGS, CORPUS, ignore)
    # Another number of threads may round differently.
    assert judge(elsewhere, here, 1e-3).difference < 1e-5
    assert elsewhere.losses == pytest.approx(here.losses, rel=1e-5)
    assert [step for step, _, _ in seen] == list(range(1, SETTINGS.steps + 1))


def test_a_process_of_its_own_that_fails_is_reported(capfd: pytest.CaptureFixture[str]) -> None:
    # The corpus has words beyond the size of the parameters.
    with pytest.raises(DemoError, match="the process that trains alone ended with exit code 1"):
        train_in_one_process(replace(SETTINGS, words=2), CORPUS, ignore)
    assert "IndexError" in capfd.readouterr().err


# The comparison


def trained(value: float = 1.0, losses: tuple[float, ...] = (2.0, 1.0)) -> Trained:
    arrays = [np.ones((2, 2), "f4") for _ in range(3)]
    arrays[1][1, 0] = value
    return Trained(Parameters(*arrays), losses)


def test_equal_results_have_no_problems() -> None:
    verdict = judge(trained(), trained(), 1e-3)
    assert verdict.problems == ()
    assert verdict.difference == 0.0
    assert (verdict.first_loss, verdict.last_loss) == (2.0, 1.0)


@pytest.mark.parametrize("field", ["input", "output", "position"])
@pytest.mark.parametrize("sign", [1, -1])
def test_results_may_differ_by_rounding_only(field: str, sign: int) -> None:
    other = trained()
    getattr(other.parameters, field)[0, 1] += sign * 0.25
    assert judge(other, trained(), tolerance=0.25).problems == ()
    verdict = judge(other, trained(), tolerance=0.249)
    assert verdict.difference == 0.25
    assert verdict.problems == ("the two results differ by 2.50e-01, more than 2.5e-01",)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_and_infinity_never_agree(value: float) -> None:
    assert judge(trained(value), trained(value), 1e-3).problems != ()
    assert judge(trained(value), trained(), 1e-3).problems != ()


@pytest.mark.parametrize("losses", [(1.0, 1.0), (1.0, 2.0), (1.0,), (1.0, math.nan)])
def test_the_loss_must_fall(losses: tuple[float, ...]) -> None:
    assert judge(trained(losses=losses), trained(), 1e-3).problems[0].startswith("the loss did not fall")


def test_the_loss_is_that_of_a_tenth_of_the_steps() -> None:
    verdict = judge(trained(losses=(5.0, 3.0, *[9.0] * 16, 1.0, 2.0)), trained(), 1e-3)
    assert (verdict.first_loss, verdict.last_loss) == (4.0, 1.5)


def test_the_tolerance_tells_a_lost_gradient_from_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = replace(SETTINGS, workers=4, steps=30)
    tolerance = tolerance_for(settings)
    whole = train_alone(settings, CORPUS, ignore)
    calls = iter(range(10**6))

    def reversed_order(found: Any) -> Any:
        return average(list(found)[::-1])

    def loses_one(found: Any) -> Any:
        # The smallest possible fault: the last worker's gradient of the last step, in one of the two tables.
        return average(found[:-1] if next(calls) == 2 * settings.steps - 1 else found)

    monkeypatch.setattr(training, "average", reversed_order)
    rounded = judge(train_alone(settings, CORPUS, ignore), whole, tolerance)
    assert 0 < rounded.difference < tolerance / 10
    monkeypatch.setattr(training, "average", loses_one)
    lost = judge(train_alone(settings, CORPUS, ignore), whole, tolerance)
    assert lost.difference > tolerance * 10


# Together. Threads instead of processes: what a process adds is tested with the command. Training runs on every real
# server; what chief and workers report about each other does not depend on the server.


@pytest.fixture
def together(
    real_client: redis.Redis, background: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Together]:
    # How often chief and workers check whether the others are still there.
    monkeypatch.setattr(training, "_TAKE_TIMEOUT", 0.2)
    monkeypatch.setattr(exchange, "_BLOCK", 100)
    made = Together(real_client, background)
    yield made
    made.gone()


class Together:
    """Starts chiefs and workers of run `t`."""

    def __init__(self, client: redis.Redis, background: Callable[..., Any]) -> None:
        self.client = client
        self._background = background

    def chief(self, settings: Settings = SETTINGS, *, timeout: float = 20.0, **options: Any) -> Any:
        def run() -> Trained:
            with Chief(self.client, "t", settings, timeout=timeout, **options) as chief:
                chief.wait_for_workers()
                return chief.train(ignore)

        return self._background(run)

    def worker(self, index: int | None = None, make_corpus: Any = lambda _: CORPUS, *, timeout: float = 20.0) -> Any:
        return self._background(work, self.client, "t", make_corpus, index=index, timeout=timeout)

    def wait_for(self, key: str, field: str) -> None:
        deadline = time.monotonic() + 20
        while not self.client.hkeys(key) or (field and not self.client.hexists(key, field)):
            assert time.monotonic() < deadline, f"no {field} in {key}"
            time.sleep(0.01)

    def gone(self) -> None:
        """Checks that no key of the run stays, and none of its accumulators."""
        deadline = time.monotonic() + 5
        while keys := set(self.client.keys("*")) - {b"redisacc:names"}:
            assert time.monotonic() < deadline, keys
            time.sleep(0.05)


def test_together_they_train_what_one_does(together: Together) -> None:
    chief = together.chief(replace(SETTINGS, workers=4))
    workers = [together.worker() for _ in range(4)]
    result = chief.result(60)
    for worker in workers:
        assert worker.result() is None
    verdict = judge(result, train_alone(replace(SETTINGS, workers=4), CORPUS, ignore), 1e-3)
    assert verdict.problems == ()
    assert verdict.difference < 1e-5
    assert verdict.last_loss < 0.95 * verdict.first_loss


@pytest.mark.servers("valkey")
def test_missing_workers_are_named(together: Together) -> None:
    chief = together.chief(timeout=3.0)
    worker = together.worker(1)
    with pytest.raises(DemoError, match=r"1 of 2 workers arrived within 3 seconds; missing: worker-0$"):
        chief.result()
    with pytest.raises(DemoError, match="the chief of run 't' is gone"):
        worker.result()


def claimed(client: redis.Redis, index: int) -> WorkerExchange:
    """Returns a worker that claims a number and then does nothing."""
    found = WorkerExchange(client, "t")
    found.claim(index, found.find_chief(20.0))
    return found


@pytest.mark.servers("valkey")
def test_a_silent_worker_is_named(together: Together) -> None:
    chief = together.chief(timeout=3.0)
    worker = together.worker(0)
    claimed(together.client, 1)
    with pytest.raises(
        DemoError,
        match=r"step 0: 1 of 2 gradients arrived for demo-t/input; missing: worker-1 \(waited 3 seconds\)",
    ):
        chief.result()
    with pytest.raises(DemoError, match="is gone"):
        worker.result()


@pytest.mark.servers("valkey")
def test_a_worker_that_leaves_is_named_at_once(together: Together) -> None:
    chief = together.chief()
    worker = together.worker(1)
    left = claimed(together.client, 0)
    # The other worker has sent its gradient, and the chief waits for that of the one that leaves.
    together.wait_for("redisacc:{demo-t/input}:workers", "worker-1")
    together.wait_for("redisacc:{demo-t/input}:takers", "")
    started = time.monotonic()
    left.close()
    with pytest.raises(DemoError, match=r"missing: worker-0; no sign of life from worker-0$"):
        chief.result()
    assert time.monotonic() < started + 10
    with pytest.raises(DemoError, match="is gone"):
        worker.result()


@pytest.mark.servers("valkey")
def test_a_local_problem_is_reported_at_once(together: Together) -> None:
    problems: list[str] = []
    chief = together.chief(local_problems=lambda: problems)
    worker = together.worker(0)
    claimed(together.client, 1)
    together.wait_for("redisacc:{demo-t/input}:workers", "worker-0")
    problems.append("worker-1 (process 5) ended with exit code 9")
    with pytest.raises(DemoError, match=r"missing: worker-1; worker-1 \(process 5\) ended with exit code 9$"):
        chief.result()
    with pytest.raises(DemoError, match="is gone"):
        worker.result()


@pytest.mark.servers("valkey")
def test_two_gradients_of_one_worker_are_no_two_workers(together: Together) -> None:
    chief = together.chief()
    worker = together.worker(0)
    claimed(together.client, 1)
    impostor = Accumulators(SETTINGS, "t", together.client, "worker-0")
    batch = sampler_for(SETTINGS, CORPUS).batch(0, 1)
    impostor.apply(training.gradients(initial_parameters(SETTINGS), batch), 0)
    with pytest.raises(DemoError, match=r"expected one gradient from each worker .*\{'worker-0': 2\} at step 0"):
        chief.result()
    impostor.close()
    with pytest.raises(DemoError, match="is gone"):
        worker.result()


@pytest.mark.servers("valkey")
def test_a_worker_with_another_text_is_turned_away(together: Together) -> None:
    chief = together.chief(timeout=2.0)
    other = replace(CORPUS, digest="0" * 64)
    with pytest.raises(DemoError, match=r"this worker's text differs from the chief's .*the same --text"):
        together.worker(0, lambda _: other).result()
    with pytest.raises(DemoError, match="0 of 2 workers arrived"):
        chief.result()


@pytest.mark.servers("valkey")
def test_a_worker_whose_parameters_went_astray_is_found(together: Together, monkeypatch: pytest.MonkeyPatch) -> None:
    write_to = exchange.Update.write_to

    def write_wrongly(self: exchange.Update, parameters: Parameters) -> None:
        write_to(self, parameters)
        parameters.input[0, 0] = np.nextafter(parameters.input[0, 0], np.float32(9))

    monkeypatch.setattr(exchange.Update, "write_to", write_wrongly)
    chief = together.chief()
    workers = [together.worker(), together.worker()]
    with pytest.raises(DemoError, match=r"the parameters of worker-\d.* differ from those of the chief"):
        chief.result(60)
    for worker in workers:
        worker.join()


@pytest.mark.servers("valkey")
def test_a_killed_chief_is_cleaned_up_after(together: Together, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "LEASE", 2)
    chief = Chief(together.client, "t", SETTINGS, timeout=20.0)
    chief.__enter__()  # and never again
    worker = together.worker(0)
    with pytest.raises(DemoError, match="the chief of run 't' is gone"):
        worker.result()
    # The accumulators have no expiry, so the worker deleted them. All other keys expire.
    assert not [key for key in together.client.keys("redisacc:{*") if together.client.ttl(key) < 0]
    chief._accumulators.close()


@pytest.mark.servers("valkey")
@pytest.mark.parametrize("dim", [SETTINGS.dim, SETTINGS.dim + 1])
def test_what_a_killed_run_left_behind(together: Together, dim: int) -> None:
    left = Accumulators(replace(SETTINGS, dim=dim), "t", together.client, "worker-0")
    left.loss.apply_grad(np.array([1.0, 1.0]))
    left.position.set_global_step(77)
    chief = together.chief(replace(SETTINGS, workers=1, steps=2))
    worker = together.worker(0, timeout=5.0 if dim == SETTINGS.dim else 0.5)
    if dim == SETTINGS.dim:
        assert len(chief.result(60).losses) == 2
        worker.result()
        with pytest.raises(redisacc.AccumulatorNotFoundError):
            left.loss.apply_grad(np.array([1.0, 1.0]))
    else:
        with pytest.raises(DemoError, match=r"other settings was killed .*; choose another name with --run"):
            chief.result()
        # This chief must not delete it.
        assert left.loss.num_accumulated() == 1
        left.delete()
        with pytest.raises(DemoError, match="no chief appeared"):
            worker.result(30)
    left.close()


def test_results_are_the_same_bit_for_bit_for_two_workers(together: Together) -> None:
    # a + b = b + a: with two workers the order of arrival makes no difference.
    found = []
    for _ in range(2):
        chief = together.chief()
        workers = [together.worker(), together.worker()]
        found.append(parameters_digest(chief.result(60).parameters))
        for worker in workers:
            worker.result()
        together.gone()
    assert found[0] == found[1]
    assert found[0] == parameters_digest(train_alone(SETTINGS, CORPUS, ignore).parameters)
