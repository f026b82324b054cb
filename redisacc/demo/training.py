"""The roles: the chief, the workers, and the same training in one process for comparison.

In each step, each worker computes the gradients of its own batch at the current parameters and applies them to four
shared accumulators with ``local_step`` = step. The chief takes all W of each, updates its parameters and sends the rows
that changed, with which the next step begins. Sparse rows are averaged over the workers *that held that row*, the dense
gradient over all W workers; the loss is summed.
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

# Seconds after which a take is interrupted, so that the chief can check whether a worker is gone.
_TAKE_TIMEOUT = 1.0

# Seconds between two log lines about missing workers. A Python process takes some seconds to start.
_LOG_EVERY = 10.0

OnStep = Callable[[int, float, int], None]
"""Called after each step with: number of steps done, loss per pair in this step, number of gradients in it."""


def sampler_for(settings: Settings, corpus: Corpus) -> Sampler:
    """Returns the sampler of these settings."""
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
    """Returns the parameters that these settings start from."""
    return Parameters.initial(settings.words, settings.dim, settings.window, settings.seed)


@dataclass(frozen=True)
class Trained:
    """The result of a training.

    Attributes:
        parameters: after the last step.
        losses: for each step, the loss per pair of words.
    """

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
        # The sum of the losses and the number of pairs; float64, because the numbers grow.
        self.loss = redisacc.ConditionalAccumulator(
            np.float64, shape=(2,), shared_name=f"demo-{run}/loss", reduction_type="SUM", **common
        )

    def all(self) -> tuple[redisacc.ConditionalAccumulatorBase[Any], ...]:
        """Returns all four, in the order in which workers apply and the chief takes."""
        return self.input, self.output, self.position, self.loss

    def apply(self, found: Gradients, step: int) -> None:
        """Applies a worker's gradients of one step.

        Raises:
            DemoError: an accumulator is already at a later step.
        """
        results: list[tuple[redisacc.ConditionalAccumulatorBase[Any], redisacc.ApplyResult]] = [
            (self.input, self.input.apply_grad(*found.input, local_step=step)),
            (self.output, self.output.apply_grad(*found.output, local_step=step)),
            (self.position, self.position.apply_grad(found.position, local_step=step)),
            (self.loss, self.loss.apply_grad(np.array([found.loss, found.pairs]), local_step=step)),
        ]
        for accumulator, result in results:
            if not result:
                raise DemoError(
                    f"the gradient of step {step} arrived too late: {accumulator.shared_name} is already at step "
                    f"{result.global_step}"
                )

    def delete(self) -> None:
        """Deletes them from Redis, except those that are gone or were created again by another process."""
        for accumulator in self.all():
            with contextlib.suppress(redisacc.AccumulatorNotFoundError):
                accumulator.delete()

    def close(self) -> None:
        """Closes the four handles."""
        for accumulator in self.all():
            accumulator.close()


class Chief:
    """The process that takes the averages, updates the parameters and sends them.

    As a context manager it claims the name of the run and creates the accumulators at the start, and deletes all keys
    at the end, also after an exception.

    Args:
        client: a client of the server.
        run: name of the run.
        settings: what is trained.
        timeout: seconds to wait for workers to appear, and for each gradient.
        local_problems: returns a text for each worker on this machine that has failed.
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
            # Accumulators that a killed run of this name left are of no use: delete them, and start at step 0.
            try:
                with contextlib.closing(self._open()) as stale:
                    stale.delete()
            except redisacc.SchemaMismatchError as error:
                raise DemoError(
                    f"an earlier run {self._run!r} with other settings was killed and left its accumulators: {error}; "
                    f"choose another name with --run, or delete them with `redisacc rm`"
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
        # The error to report is why the training ended, not why the cleaning up failed.
        with contextlib.suppress(redis.RedisError, redisacc.RedisAccError):
            # If the server has gone away, this fails soon; the library would retry for half a minute.
            self._client.ping()
            self._clean_up()

    def _clean_up(self) -> None:
        # The name goes last: as long as it is held, no worker and no other chief touches the accumulators.
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
        """Blocks until every worker holds its number.

        Raises:
            DemoError: some are missing after ``timeout`` seconds, or one on this machine has failed.
        """
        deadline = time.monotonic() + self._timeout
        log_at = time.monotonic() + _LOG_EVERY
        while True:
            there = self._exchange.workers()
            missing = [name for index, name in enumerate(self._names) if index not in there]
            if not missing:
                return
            self._raise_local_problems(f"still missing: {', '.join(missing)}")
            if time.monotonic() > deadline:
                raise DemoError(
                    f"{len(there)} of {len(self._names)} workers arrived within {self._timeout:g} seconds; "
                    f"missing: {', '.join(missing)}"
                )
            if time.monotonic() > log_at:
                logger.info("waiting for %s", ", ".join(missing))
                log_at += _LOG_EVERY
            self._exchange.renew()
            time.sleep(0.1)

    def train(self, on_step: OnStep) -> Trained:
        """Takes the gradients, updates the parameters and sends them, for every step. Blocks until the last step.

        Raises:
            DemoError: a gradient is missing for ``timeout`` seconds, or its worker is known to be gone; the message
                names the missing workers.
        """
        assert self._accumulators is not None
        parameters = initial_parameters(self._settings)
        optimiser = Adagrad(parameters, self._settings.rate)
        losses = []
        for step in range(self._settings.steps):
            # The rounds are acknowledged once the update has been sent.
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
                taken = rounds.enter_context(accumulator.take(len(self._names), timeout=_TAKE_TIMEOUT))
            except redisacc.TakeTimeoutError as error:
                missing = [name for name in self._names if name not in error.workers]
                text = (
                    f"step {step}: {error.num_accumulated} of {len(self._names)} gradients arrived for "
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
            # A worker that was started twice contributes twice, and the round fills without another worker's gradient.
            if taken.workers != dict.fromkeys(self._names, 1) or taken.global_step != step:
                raise DemoError(
                    f"step {step}: expected one gradient from each worker for {accumulator.shared_name}, "
                    f"but found {taken.workers} at step {taken.global_step}"
                )
            return taken.gradient

    def _raise_local_problems(self, text: str) -> None:
        problems = self._local_problems()
        if problems:
            raise DemoError("; ".join([text, *problems]))

    def _wait_for_reports(self, digest: str) -> None:
        # After this the keys can be deleted, because every worker has read the last update.
        deadline = time.monotonic() + self._timeout
        while True:
            reports = self._exchange.finished()
            differing = [self._names[i] for i in reports if i < len(self._names) and reports[i] != digest]
            if differing:
                raise DemoError(f"the parameters of {', '.join(differing)} differ from those of the chief")
            missing = [name for index, name in enumerate(self._names) if index not in reports]
            if not missing:
                return
            self._raise_local_problems(f"the last step is done, but {', '.join(missing)} did not report")
            if time.monotonic() > deadline:
                raise DemoError(
                    f"the last step is done, but {', '.join(missing)} did not report within {self._timeout:g} seconds"
                )
            self._exchange.renew()
            time.sleep(0.02)


def worker_name(index: int) -> str:
    """Returns the name under which a worker's gradients are counted."""
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
    """Runs a worker: finds the chief, and computes gradients until the last step is done.

    Args:
        client: a client of the server.
        run: name of the run.
        make_corpus: returns the corpus for a size of vocabulary.
        index: number of this worker; None for the lowest free one.
        timeout: seconds to wait for a chief. After that, the worker waits for updates as long as the chief is alive.
        on_start: called with the worker's number and the settings.

    Raises:
        DemoError: the worker cannot start or continue.
    """
    exchange = WorkerExchange(client, run)
    accumulators: Accumulators | None = None
    try:
        settings = exchange.find_chief(timeout)
        corpus = make_corpus(settings.vocabulary)
        if corpus.digest != settings.digest or len(corpus.words) != settings.words:
            raise DemoError(
                f"this worker's text differs from the chief's ({len(corpus.tokens)} words, digest "
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
            # Accumulators vanish when the chief has ended, and that is the error to report.
            exchange.check_chief()
            raise
    except BaseException:
        _leave(exchange, accumulators, failed=True)
        raise
    _leave(exchange, accumulators, failed=False)


def _leave(exchange: WorkerExchange, accumulators: Accumulators | None, *, failed: bool) -> None:
    # An error here must not replace the reason for leaving. If the server has gone away, the first command fails soon;
    # the library would retry for half a minute.
    with contextlib.suppress(redis.RedisError, redisacc.RedisAccError):
        exchange.close()
        if accumulators is not None:
            # A killed chief deletes nothing, and a worker that opens the accumulators just after the chief deleted
            # them creates them again. The incarnation in the handle protects those of a later chief.
            if failed and exchange.nobody_is_chief():
                accumulators.delete()
            accumulators.close()


def average(found: Sequence[tuple[IntArray, Array]]) -> tuple[IntArray, Array]:
    """Returns the mean of sparse gradients: each row is divided by the number of gradients that held it."""
    indices, sums, counts = sum_rows(
        np.concatenate([indices for indices, _ in found]), np.concatenate([rows for _, rows in found])
    )
    return indices, sums / counts[:, None].astype(sums.dtype)


def train_alone(settings: Settings, corpus: Corpus, on_step: OnStep) -> Trained:
    """Trains with the same batches and averages in one process, without Redis and without accumulators."""
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
    """The comparison of a training with the same training in one process.

    Attributes:
        difference: largest absolute difference of a parameter.
        first_loss: mean loss of the first tenth of the steps.
        last_loss: mean loss of the last tenth of the steps.
        problems: a text for each failure; empty if there is none.
    """

    difference: float
    first_loss: float
    last_loss: float
    problems: tuple[str, ...]


def tolerance_for(settings: Settings) -> float:
    """Returns the largest difference of a parameter between two equal trainings that counts as rounding.

    Both add the same numbers, but float32 addition rounds, and through Redis the gradients arrive in another order each
    time. Each step then builds on slightly different parameters. Measured with the defaults (688 steps, rate 0.15,
    parameters up to 3 in size): trainings that differ only in the order of addition end 1e-5 to 2e-5 apart, while one
    gradient of one worker that is lost in the first, the middle or the last step moves a parameter by 8e-2 or more
    (with 8 workers: 6e-2). The bound, 1e-3 there, is a factor of 50 or more from both. It is proportional to the rate,
    as every change of a parameter is, and in longer trainings to the steps, over which rounding adds up (2,000 steps:
    5e-5).
    """
    return settings.rate / 150 * max(1.0, settings.steps / 1000)


def judge(shared: Trained, alone: Trained, tolerance: float) -> Verdict:
    """Compares two trainings: they must be at most ``tolerance`` apart, and the loss of ``shared`` must fall."""
    # In numpy's max, unlike Python's, a NaN wins over every number.
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
        problems.append(f"the loss did not fall: {first:.4f} at the start, {last:.4f} at the end")
    return Verdict(difference, first, last, tuple(problems))


def _largest_difference(ours: Array, theirs: Array) -> float:
    with np.errstate(invalid="ignore"):  # two infinities are NaN apart, and NaN agrees with nothing
        return float(np.max(np.abs(ours.astype(np.float64) - theirs.astype(np.float64))))


def _mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))
