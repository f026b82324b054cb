"""Everything that is watched on a server: the state of accumulators, their rounds and steps, and the server itself."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import threading
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from redisacc._clock import clock
from redisacc._format.entries import WorkerInfo
from redisacc._format.history_entries import PastStep
from redisacc._format.keys import Keys, ParameterKeys
from redisacc._format.stored_text import clock_ms, time_of
from redisacc._protocol.lifecycle.info import AccumulatorInfo, read_info, summary_commands
from redisacc._protocol.parameters.history import read_history
from redisacc._protocol.parameters.info import ParametersInfo, read_parameters_info
from redisacc._wire.transport import Transport, limited
from redisacc.errors import NotFoundError, RedisAccError, ServerUnavailableError
from redisacc.tools.admin.catalog import list_names
from redisacc.tools.monitoring.nodes import Node, read_nodes
from redisacc.tools.monitoring.rounds import RoundHistory, RoundListener

# Seconds over which rates are averaged.
RATES_WINDOW = 5.0
# The number of accumulators whose summaries are read in one round trip.
BATCH = 100
# Seconds after which an accumulator is read in full although its summary is the same. An entry that was replaced by
# another one, such as a round that was recovered, does not change the summary.
LONGEST_REST = 30.0


@dataclass
class View:
    """One accumulator that is watched.

    Attributes:
        info: its latest state.
        history: (time in seconds, applied, stale, takes) of the last seconds, the oldest first.
        required: the number of gradients that the last waiting taker required; None if there was none yet.
        parameters: the latest state of the parameters of the same name; None if there are none.
        published: (time in seconds, step) of their versions of the last seconds, the oldest first; at least the last
            two that were seen.
        summary: the replies of its summary when it was last read in full.
        read_at: when that was, in seconds of ``clock.now()``.
        heard: what a ``Monitor`` has heard of its rounds.
        steps: the steps of its run, if they are read.
        steps_until: the incarnation of the parameters, and the latest step, when these were read.
    """

    info: AccumulatorInfo
    history: deque[tuple[float, int, int, int]] = field(default_factory=deque)
    required: int | None = None
    parameters: ParametersInfo | None = None
    published: deque[tuple[float, int]] = field(default_factory=deque)
    summary: list[Any] = field(default_factory=list)
    read_at: float = -math.inf
    heard: RoundHistory = field(default_factory=RoundHistory)
    steps: list[PastStep] = field(default_factory=list)
    steps_until: tuple[str, PastStep | None] | None = None

    def add(self, info: AccumulatorInfo, parameters: ParametersInfo | None = None) -> None:
        """Adds a new state. A new incarnation starts a new history."""
        if info.incarnation != self.info.incarnation:
            self.history.clear()
            self.required = None
        self.info = info
        at = info.read_at.timestamp()
        self.history.append((at, info.applied, info.stale, info.takes))
        while len(self.history) > 2 and self.history[0][0] < at - RATES_WINDOW:
            self.history.popleft()
        if info.waiting:
            self.required = info.waiting[0].num_required

        self._add_parameters(parameters)

    def _add_parameters(self, parameters: ParametersInfo | None) -> None:
        before, self.parameters = self.parameters, parameters
        if parameters is None or before is None or before.incarnation != parameters.incarnation:
            self.published.clear()
        if parameters is None:
            return
        at = parameters.published_at.timestamp()
        if not self.published or self.published[-1][1] < parameters.step:
            self.published.append((at, parameters.step))
        elif self.published[-1][1] > parameters.step:
            # The server has lost some versions.
            self.published.clear()
        while len(self.published) > 2 and self.published[0][0] < at - RATES_WINDOW:
            self.published.popleft()

    @property
    def is_over(self) -> bool:
        """Whether its run is finished: workers leave it, and nobody waits for them."""
        return self.parameters is not None and self.parameters.finished

    @property
    def awaited(self) -> list[WorkerInfo]:
        """The late and gone workers that hold up the first waiting taker; none if the run is finished."""
        info = self.info
        if self.is_over or not info.waiting or info.num_accumulated >= info.waiting[0].num_required:
            return []
        return [*info.states.late, *info.states.gone]

    @property
    def step_seconds(self) -> float | None:
        """How long a step of the run takes, in seconds: the mean of the latest ones; None means it is unknown."""
        if len(self.published) > 1:
            (first, low), (last, high) = self.published[0], self.published[-1]
            return max(last - first, 0.0) / (high - low)
        return None if self.parameters is None else self.parameters.step_seconds

    @property
    def rates(self) -> tuple[float, float, float]:
        """Gradients applied, stale gradients and rounds taken, each per second."""
        first, last = self.history[0], self.history[-1]
        seconds = last[0] - first[0]
        if seconds <= 0:
            return 0.0, 0.0, 0.0
        applied, stale, takes = ((last[n] - first[n]) / seconds for n in (1, 2, 3))
        return applied, stale, takes


class Collector:
    """Reads the state of accumulators again and again. One thread at a time may use it.

    A refresh lists the names, reads a short summary of each accumulator, and everything about those whose summary is
    not the same as before. So a server that has a thousand accumulators, three of them in use, gets few requests.

    Args:
        transport: the way to the server.
        patterns: globs of the names of accumulators.
        keys: the keys of further accumulators.

    Attributes:
        views: accumulator's name → its view, sorted by name.
        address: where the server is, without a password.
        problems: what is wrong with accumulators that could not be read in the latest refresh, as texts that may
            contain foreign text.
    """

    def __init__(self, transport: Transport, patterns: Sequence[str], keys: Sequence[Keys] = ()) -> None:
        self._transport = transport
        self.address = transport.address
        self._patterns = patterns
        self._keys = keys
        self.views: dict[str, View] = {}
        self.problems: list[str] = []

    def refresh(self, *, timeout: float = math.inf, budget: float = math.inf, first: Collection[str] = ()) -> None:
        """Reads the server.

        Args:
            timeout: how many seconds each request may take.
            budget: how many seconds are spent on reading in full what has changed. What is not reached stays as it was,
                and comes first in the next refresh.
            first: names of accumulators that are read in full before all others, whatever the budget.

        Raises:
            ServerUnavailableError: the server does not answer. The views are as they were.
            RedisAccError: the server refuses.
        """
        with limited(timeout):
            self._refresh(budget, first)

    def _refresh(self, budget: float, first: Collection[str]) -> None:
        # Also notices that the server does not answer if there are no patterns.
        self._transport.call("TIME")
        names = {name for pattern in self._patterns for name in list_names(self._transport, pattern)}
        wanted = {keys.name: keys for keys in (*map(Keys, names), *self._keys)}
        self.problems = []
        views: dict[str, View] = {}
        changed: list[tuple[tuple[bool, float], Keys, list[Any]]] = []
        now = clock.now()
        for keys, summary, read_at in self._summaries([keys for _, keys in sorted(wanted.items())]):
            if summary is not None and not any(value is not None for value in summary[0] or ()):
                # There is no record: deleted, or a name that `redisacc doctor --fix` removes.
                continue
            view = self.views.get(keys.name)
            if view is not None:
                views[keys.name] = view
            if view is None or summary is None or summary != view.summary or view.read_at < now - LONGEST_REST:
                at = -math.inf if view is None else view.read_at
                changed.append(((keys.name not in first, at), keys, summary or []))
            else:
                view.add(dataclasses.replace(view.info, read_at=read_at), view.parameters)
        deadline = clock.now() + budget
        for (is_other, _), keys, summary in sorted(changed, key=lambda entry: entry[0]):
            if is_other and clock.now() >= deadline:
                break
            self._read_whole(keys, summary, views)
        self.views = dict(sorted(views.items()))

    def _read_whole(self, keys: Keys, summary: list[Any], views: dict[str, View]) -> None:
        view = views.pop(keys.name, None)
        with self._noting():
            info, parameters = read_info(self._transport, keys), None
            if len(summary) < 2 or summary[1][0] is not None:
                with self._noting():
                    parameters = read_parameters_info(self._transport, ParameterKeys(keys.name))
            views[keys.name] = view = view or View(info)
            view.add(info, parameters)
            view.summary, view.read_at = summary, clock.now()

    @contextlib.contextmanager
    def _noting(self) -> Iterator[None]:
        """Notes what is wrong with one name, which must not hide the others."""
        try:
            yield
        except ServerUnavailableError:
            raise
        except NotFoundError:
            return
        except RedisAccError as error:
            self.problems.append(str(error))

    def _summaries(self, wanted: Sequence[Keys]) -> Iterator[tuple[Keys, list[Any] | None, Any]]:
        """Yields the summary of each accumulator, and when it was read; None if the server refused a command of it."""
        for start in range(0, len(wanted), BATCH):
            batch = wanted[start : start + BATCH]
            groups = [summary_commands(keys) for keys in batch]
            try:
                *replies, now = self._transport.pipeline([*itertools.chain.from_iterable(groups), ("TIME",)])
            except ServerUnavailableError:
                raise
            except RedisAccError:
                # A key that is not redisacc's must not hide the other accumulators.
                yield from ((keys, None, None) for keys in batch)
                continue
            found = iter(replies)
            read_at = time_of(clock_ms(now))
            for keys, group in zip(batch, groups, strict=True):
                yield keys, list(itertools.islice(found, len(group))), read_at


def curves(steps: Sequence[PastStep], names: Sequence[str], most: int) -> tuple[list[int], list[list[float | None]]]:
    """Returns the curves of metrics, and of the time of a step, with few points, each the mean of some steps.

    The boundaries between points depend on the steps alone, so that points do not move as the run continues.

    Args:
        steps: the steps, the first one first.
        names: the names of the metrics.
        most: maximum number of points.

    Returns:
        The last step of each point; and for each metric, and then for the seconds of a step, a value at each point:
        the mean of the finite ones, None without any.
    """
    if not steps:
        return [], []
    width = 1
    while steps[-1].step // width - steps[0].step // width >= most:
        width *= 2
    groups = [list(group) for _, group in itertools.groupby(steps, lambda step: step.step // width)]
    values = [[_mean([of.metrics.get(name, math.nan) for of in group]) for group in groups] for name in names]
    values.append([_mean([of.seconds for of in group]) for group in groups])
    return [group[-1].step for group in groups], values


def _mean(values: Sequence[float]) -> float | None:
    finite = [value for value in values if math.isfinite(value)]
    # Without an overflow of the sum.
    return sum(value / len(finite) for value in finite) if finite else None


class Monitor(Collector):
    """Reads accumulators whenever it is asked to, and listens to their events in between. Close it with ``close()``.

    One thread at a time may use it: whoever reads it in several threads holds ``lock`` meanwhile.

    Args:
        transport: the way to the server.
        patterns: globs of the names of accumulators.
        keys: the keys of further accumulators.

    Attributes:
        views, problems: as for ``Collector``.
        nodes: the server, or the masters of a cluster, as of the latest refresh.
        lock: for the threads that share it.
    """

    def __init__(self, transport: Transport, patterns: Sequence[str], keys: Sequence[Keys] = ()) -> None:
        super().__init__(transport, patterns, keys)
        self._listener: RoundListener | None = None
        self.nodes: list[Node] = []
        self.lock = threading.Lock()
        # Later, if the server does not answer yet.
        with contextlib.suppress(RedisAccError):
            self._listen()

    def refresh(self, *, timeout: float = math.inf, budget: float = math.inf, first: Collection[str] = ()) -> None:
        """Reads the server, as ``Collector.refresh`` does.

        Raises:
            ServerUnavailableError: the server does not answer. Everything is as it was.
            RedisAccError: the server refuses.
        """
        super().refresh(timeout=timeout, budget=budget, first=first)
        listener = self._listen()
        listener.follow(list(self.views))
        for name, view in self.views.items():
            view.heard = listener.history(name)
        with limited(timeout):
            self._read_histories(first)
            self.nodes = read_nodes(self._transport)

    def close(self) -> None:
        """Stops listening. Closing twice does nothing."""
        if self._listener is not None:
            self._listener.close()

    def _read_histories(self, names: Collection[str]) -> None:
        for name, view in self.views.items():
            of = view.parameters
            if name not in names or of is None:
                view.steps, view.steps_until = [], None
            elif view.steps_until != (until := (of.incarnation, of.latest)):
                with self._noting():
                    view.steps = read_history(self._transport, ParameterKeys(name))
                    view.steps_until = until

    def _listen(self) -> RoundListener:
        if self._listener is None:
            self._listener = RoundListener(self._transport, self._patterns, [of.name for of in self._keys])
        return self._listener
