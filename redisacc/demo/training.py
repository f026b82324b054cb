"""The roles: the chief, the workers, and the same training in one process to compare with.

One step: each worker computes the gradients of its own batch at the current parameters and applies them to
four shared accumulators with ``local_step`` = step. The chief takes all W of each, updates its parameters and
sends the rows that changed; with them the next step begins. Sparse rows are averaged over the workers *that
held that row*, the dense gradient over all W; the loss is summed.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import redis

import redisacc
from redisacc.demo import DemoError
from redisacc.demo.exchange import ChiefExchange, Settings, Update, WorkerExchange, parameters_digest
from redisacc.demo.skipgram import Adagrad, Array, Gradients, Parameters, Sampler, gradients, sum_rows
from redisacc.demo.text import Corpus, IntArray

logger = logging.getLogger("redisacc.demo")

# A take is tried in pieces of this many seconds, so that the chief notices meanwhile when a worker is gone.
_PATIENCE = 1.0

# Seconds between two words about whom the chief waits for. A Python process takes some of them to start.
_SAY = 10.0

OnStep = Callable[[int, float, int], None]
"""Called after each step with: steps done, the loss of a pair in this step, gradients counted in it."""


def sampler_for(settings: Settings, corpus: Corpus) -> Sampler:
    """The batches that these settings mean."""
    return Sampler(
        corpus,
        seed=settings.seed,
        workers=settings.workers,
        batch=settings.batch,
        window=settings.window,
        negatives=settings.negatives,
        shared_negatives=settings.shared_negatives,
        subsampling=settings.subsampling,
    )


def initial_parameters(settings: Settings) -> Parameters:
    """The parameters that these settings start from."""
    return Parameters.initial(settings.words, settings.dim, settings.window, settings.seed)


@dataclass(frozen=True)
class Trained:
    """The end of a training: the parameters, and the loss of each step for each pair of words."""

    parameters: Parameters
    losses: tuple[float, ...]


class Accumulators:
    """The four accumulators of a run, opened by one process."""

    def __init__(self, settings: Settings, run: str, client: redis.Redis, worker: str | None) -> None:
        common: dict[str, Any] = {"redis": client, "worker": worker}
        table = (settings.words, settings.dim)
        self.input = redisacc.SparseConditionalAccumulator(
            np.float32, shape=table, shared_name=f"demo-{run}/input", reduction_type="MEAN", **common
        )
        self.output = redisacc.SparseConditionalAccumulator(
            np.float32, shape=table, shared_name=f"demo-{run}/output", reduction_type="MEAN", **common
        )
        self.position = redisacc.ConditionalAccumulator(
            np.float32,
            shape=(2 * settings.window, settings.dim),
            shared_name=f"demo-{run}/position",
            reduction_type="MEAN",
            **common,
        )
        # The sum of the losses and the number of pairs: float64, because it adds up and is only looked at.
        self.loss = redisacc.ConditionalAccumulator(
            np.float64, shape=(2,), shared_name=f"demo-{run}/loss", reduction_type="SUM", **common
        )

    def all(self) -> tuple[redisacc.ConditionalAccumulatorBase[Any], ...]:
        """All four, in the order in which workers apply and the chief takes."""
        return self.input, self.output, self.position, self.loss

    def apply(self, found: Gradients, step: int) -> None:
        """Apply a worker's gradients of one step. DemoError if an accumulator is at a later step already."""
        results: list[tuple[redisacc.ConditionalAccumulatorBase[Any], redisacc.ApplyResult]] = [
            (self.input, self.input.apply_grad(*found.input, local_step=step)),
            (self.output, self.output.apply_grad(*found.output, local_step=step)),
            (self.position, self.position.apply_grad(found.position, local_step=step)),
            (self.loss, self.loss.apply_grad(np.array([found.loss, found.pairs]), local_step=step)),
        ]
        for accumulator, result in results:
            if not result:
                raise DemoError(
                    f"the gradient of step {step} came too late: {accumulator.shared_name} is at step "
                    f"{result.global_step}"
                )

    def delete(self) -> None:
        """Remove them from Redis; those that are gone, or were created anew by others, are left alone."""
        for accumulator in self.all():
            with contextlib.suppress(redisacc.AccumulatorNotFoundError):
                accumulator.delete()

    def close(self) -> None:
        """Close the four handles."""
        for accumulator in self.all():
            accumulator.close()


class Chief:
    """The process that takes the averages, updates the parameters and sends them.

    ``timeout``: seconds that it waits for workers to appear, and for a gradient. ``local_problems`` says what
    is known to be wrong with workers on this machine, in words; an empty sequence when nothing is. As a
    context manager it takes the run's name and creates the accumulators at the start, and deletes all keys at
    the end, whatever happened in between.
    """

    def __init__(
        self,
        client: redis.Redis,
        run: str,
        settings: Settings,
        *,
        timeout: float,
        local_problems: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        self._client = client
        self._run = run
        self._settings = settings
        self._timeout = timeout
        self._local_problems = local_problems
        self._exchange = ChiefExchange(client, run)
        self._accumulators: Accumulators | None = None
        self._names = [worker_name(index) for index in range(settings.workers)]

    def __enter__(self) -> Chief:
        self._exchange.claim()
        try:
            # What a killed run of this name has left is stale: delete it, and start at step 0.
            try:
                with contextlib.closing(self._open()) as stale:
                    stale.delete()
            except redisacc.SchemaMismatchError as error:
                raise DemoError(
                    f"an earlier run {self._run!r} with other settings was killed and left its accumulators; "
                    f"choose another name with --run ({error})"
                ) from None
            self._accumulators = self._open()
            self._exchange.announce(self._settings)
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self._clean_up()
            return
        # What is said must be why the training ended, not why cleaning up after that failed.
        with contextlib.suppress(redis.RedisError, redisacc.RedisAccError):
            # Where the server has gone away, the library would look for it for half a minute.
            self._client.ping()
            self._clean_up()

    def _clean_up(self) -> None:
        # The name goes last: as long as it is held, no worker and no other chief touches the accumulators'
        # names.
        try:
            if self._accumulators is not None:
                self._accumulators.delete()
                self._accumulators.close()
        finally:
            self._exchange.close()

    def _open(self) -> Accumulators:
        return Accumulators(self._settings, self._run, self._client, None)

    @property
    def references(self) -> tuple[str, ...]:
        """The keys of the accumulators' records, for ``redis-cli``."""
        assert self._accumulators is not None
        return tuple(accumulator.accumulator_ref for accumulator in self._accumulators.all())

    def wait_for_workers(self) -> None:
        """Block until every worker is there. DemoError naming the missing ones after ``timeout`` seconds."""
        deadline = time.monotonic() + self._timeout
        say = time.monotonic() + _SAY
        while True:
            there = self._exchange.workers()
            missing = [name for index, name in enumerate(self._names) if index not in there]
            if not missing:
                return
            self._raise_local_problems(f"still missing: {', '.join(missing)}")
            if time.monotonic() > deadline:
                raise DemoError(
                    f"{len(there)} of {len(self._names)} workers came within {self._timeout:g} seconds; "
                    f"missing: {', '.join(missing)}"
                )
            if time.monotonic() > say:
                logger.info("waiting for %s", ", ".join(missing))
                say += _SAY
            self._exchange.renew()
            time.sleep(0.1)

    def train(self, on_step: OnStep) -> Trained:
        """Take, update, send, for every step.

        Blocks as long as gradients keep coming. DemoError when one is missing for ``timeout`` seconds, or at
        once when its worker is known to be gone; the message names the missing workers.
        """
        assert self._accumulators is not None
        parameters = initial_parameters(self._settings)
        optimiser = Adagrad(parameters, self._settings.rate)
        losses = []
        for step in range(self._settings.steps):
            # The rounds are acknowledged when the update is out.
            with contextlib.ExitStack() as rounds:
                taken = [self._take(rounds, accumulator, step) for accumulator in self._accumulators.all()]
                into, out, position, loss = taken
                optimiser.update((into.indices, into.values), (out.indices, out.values), position)
                self._exchange.publish(step, Update.of(parameters, into.indices, out.indices))
            self._exchange.renew()
            losses.append(float(loss[0] / loss[1]))
            on_step(step + 1, losses[-1], len(taken) * self._settings.workers)
        self._wait_for_reports(parameters_digest(parameters))
        return Trained(parameters, tuple(losses))

    def _take(
        self, rounds: contextlib.ExitStack, accumulator: redisacc.ConditionalAccumulatorBase[Any], step: int
    ) -> Any:
        deadline = time.monotonic() + self._timeout
        while True:
            try:
                taken = rounds.enter_context(accumulator.take(len(self._names), timeout=_PATIENCE))
            except redisacc.TakeTimeoutError as error:
                missing = [name for name in self._names if name not in error.workers]
                text = (
                    f"step {step}: {error.num_accumulated} of {len(self._names)} gradients came for "
                    f"{accumulator.shared_name}; missing: {', '.join(missing)}"
                )
                self._raise_local_problems(text)
                there = self._exchange.workers()
                gone = [name for index, name in enumerate(self._names) if index not in there]
                if gone:
                    raise DemoError(f"{text}; no sign of life from {', '.join(gone)}") from None
                if time.monotonic() > deadline:
                    raise DemoError(f"{text} (waited {self._timeout:g} seconds)") from None
                self._exchange.renew()
                continue
            # W gradients are the right W only if each worker sent one: a second one from a worker that was
            # started twice would otherwise stand in for a missing one.
            if taken.workers != dict.fromkeys(self._names, 1) or taken.global_step != step:
                raise DemoError(
                    f"step {step}: expected one gradient from each worker for {accumulator.shared_name}, "
                    f"found {taken.workers} at step {taken.global_step}"
                )
            return taken.gradient

    def _raise_local_problems(self, text: str) -> None:
        problems = self._local_problems()
        if problems:
            raise DemoError("; ".join([text, *problems]))

    def _wait_for_reports(self, digest: str) -> None:
        # Also the reason why the keys can go afterwards: every worker has read the last update.
        deadline = time.monotonic() + self._timeout
        while True:
            reports = self._exchange.finished()
            differing = [self._names[i] for i in reports if i < len(self._names) and reports[i] != digest]
            if differing:
                raise DemoError(f"the parameters of {', '.join(differing)} aren't those of the chief")
            missing = [name for index, name in enumerate(self._names) if index not in reports]
            if not missing:
                return
            self._raise_local_problems(f"the last step is done, without a report from {', '.join(missing)}")
            if time.monotonic() > deadline:
                raise DemoError(
                    f"the last step is done, but {', '.join(missing)} didn't report within {self._timeout:g} seconds"
                )
            self._exchange.renew()
            time.sleep(0.02)


def worker_name(index: int) -> str:
    """The name under which a worker's gradients are counted."""
    return f"worker-{index}"


def work(
    client: redis.Redis,
    run: str,
    make_corpus: Callable[[int], Corpus],
    *,
    index: int | None,
    timeout: float,
    on_start: Callable[[int, Settings], None] | None = None,
) -> None:
    """Be a worker of ``run``: find the chief, and compute gradients until its last step is done.

    ``make_corpus`` makes the corpus for the given size of vocabulary. ``index``: this worker's number, None
    for any that is free. ``timeout``: seconds to wait for a chief; after that the worker waits for the
    chief's updates as long as the chief is alive. DemoError when it can't start or go on.
    """
    exchange = WorkerExchange(client, run)
    accumulators: Accumulators | None = None
    try:
        settings = exchange.find_chief(timeout)
        corpus = make_corpus(settings.vocabulary)
        if corpus.digest != settings.digest or len(corpus.words) != settings.words:
            raise DemoError(
                f"this worker's text isn't the chief's ({len(corpus.tokens)} words, digest "
                f"{corpus.digest[:12]}; the chief's digest is {settings.digest[:12]}): give both the same "
                "--text, or the same version of Python"
            )
        number = exchange.claim(index, settings)
        if on_start is not None:
            on_start(number, settings)
        try:
            accumulators = Accumulators(settings, run, client, worker_name(number))
            sampler = sampler_for(settings, corpus)
            parameters = initial_parameters(settings)
            for step in range(settings.steps):
                accumulators.apply(gradients(parameters, sampler.batch(step, number)), step)
                exchange.next_update(step, settings).write_to(parameters)
                exchange.renew()
            exchange.finish(parameters_digest(parameters))
        except (redisacc.AccumulatorNotFoundError, redisacc.CancelledError):
            # The usual reason for accumulators that vanish is that the chief has ended: say that instead.
            exchange.check_chief()
            raise
    except BaseException:
        _leave(exchange, accumulators, failed=True)
        raise
    _leave(exchange, accumulators, failed=False)


def _leave(exchange: WorkerExchange, accumulators: Accumulators | None, *, failed: bool) -> None:
    # The reason for leaving must not be replaced by what goes wrong here. The first command fails soon where the
    # server has gone away, unlike the library, which would look for it for half a minute.
    with contextlib.suppress(redis.RedisError, redisacc.RedisAccError):
        exchange.close()
        if accumulators is not None:
            # A chief that was killed deletes nothing. A worker that opens the accumulators just after the
            # chief deleted them even creates them anew. The handle's incarnation keeps this from hitting
            # those of a later chief.
            if failed and exchange.nobody_is_chief():
                accumulators.delete()
            accumulators.close()


def average(found: Sequence[tuple[IntArray, Array]]) -> tuple[IntArray, Array]:
    """The mean of sparse gradients: each row divided by the number of them that held it."""
    indices, sums, counts = sum_rows(
        np.concatenate([indices for indices, _ in found]), np.concatenate([rows for _, rows in found])
    )
    return indices, sums / counts[:, None].astype(sums.dtype)


def train_alone(settings: Settings, corpus: Corpus, on_step: OnStep) -> Trained:
    """The same batches and the same averages in one process, without Redis and without accumulators."""
    sampler = sampler_for(settings, corpus)
    parameters = initial_parameters(settings)
    optimiser = Adagrad(parameters, settings.rate)
    losses = []
    for step in range(settings.steps):
        found = [gradients(parameters, sampler.batch(step, worker)) for worker in range(settings.workers)]
        position = found[0].position.copy()
        for other in found[1:]:
            position += other.position
        position /= np.float32(len(found))
        optimiser.update(average([g.input for g in found]), average([g.output for g in found]), position)
        losses.append(sum(g.loss for g in found) / sum(g.pairs for g in found))
        on_step(step + 1, losses[-1], 4 * len(found))
    return Trained(parameters, tuple(losses))


@dataclass(frozen=True)
class Verdict:
    """How a training compares with the one in one process.

    ``difference``: the largest absolute difference of any parameter. ``first_loss`` and ``last_loss``: the
    means over the first and the last tenth of the steps. ``problems``: what is wrong, in words; empty when
    all is well.
    """

    difference: float
    first_loss: float
    last_loss: float
    problems: tuple[str, ...]


def tolerance_for(settings: Settings) -> float:
    """How far two trainings of the same thing may be apart, as the largest absolute difference of a parameter.

    Both add the same numbers, but float32 addition rounds, and through Redis gradients arrive in another order each
    time; each step then builds on slightly different parameters. Measured with the defaults (688 steps, rate 0.15,
    parameters up to 3 in size): trainings that differ in the order of addition alone end 1e-5 to 2e-5 apart, while a
    single gradient of a single worker lost in the first, the middle or the last step moves some parameter by 8e-2 or
    more (with 8 workers: 6e-2). The bound, 1e-3 there, stands a factor of 50 or more from both. It goes with
    the rate, as everything that moves a parameter does, and for longer trainings with the steps, over which rounding
    adds up (2,000 steps: 5e-5).
    """
    return settings.rate / 150 * max(1.0, settings.steps / 1000)


def judge(shared: Trained, alone: Trained, tolerance: float) -> Verdict:
    """Compare two trainings: well if they are at most ``tolerance`` apart and the loss of ``shared`` fell."""
    # numpy's max, not Python's: a NaN must win over every number.
    difference = float(
        np.max(
            [
                _largest_difference(shared.parameters.input, alone.parameters.input),
                _largest_difference(shared.parameters.output, alone.parameters.output),
                _largest_difference(shared.parameters.position, alone.parameters.position),
            ]
        )
    )
    tenth = max(1, len(shared.losses) // 10)
    first, last = _mean(shared.losses[:tenth]), _mean(shared.losses[-tenth:])
    problems = []
    # "not <=", because NaN is a problem too.
    if not difference <= tolerance:
        problems.append(f"the two results differ by {difference:.2e}, more than {tolerance:.1e}")
    if not last < first:
        problems.append(f"the loss didn't fall: {first:.4f} at the start, {last:.4f} at the end")
    return Verdict(difference, first, last, tuple(problems))


def _largest_difference(ours: Array, theirs: Array) -> float:
    with np.errstate(invalid="ignore"):  # two infinities are NaN apart, and NaN agrees with nothing
        return float(np.max(np.abs(ours.astype(np.float64) - theirs.astype(np.float64))))


def _mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))
