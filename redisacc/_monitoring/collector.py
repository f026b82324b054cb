"""Reads the state of many accumulators, economically: in batches, and in full only what has changed."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from redisacc._admin.catalogue import list_names
from redisacc._clock import clock
from redisacc._format.keys import Keys, ParameterKeys
from redisacc._format.stored_text import clock_ms, time_of
from redisacc._monitoring.view import View
from redisacc._protocol.lifecycle.info import read_info, summary_commands
from redisacc._protocol.parameters.info import ParametersInfo, read_parameters_info
from redisacc._redis.sockets import Command
from redisacc._redis.transport import Transport, limited
from redisacc.errors import NotFoundError, RedisAccError, ServerUnavailableError

# The number of accumulators whose summaries are read in one round trip.
BATCH = 100
# Seconds after which an accumulator is read in full although its summary is the same. An entry that was replaced by
# another one, such as a round that was recovered, does not change the summary.
LONGEST_REST = 30.0


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
        problems: what is wrong with accumulators that could not be read in the latest refresh, as texts that may
            contain foreign text.
    """

    def __init__(self, transport: Transport, patterns: Sequence[str], keys: Sequence[Keys] = ()) -> None:
        self._transport = transport
        self._patterns = patterns
        self._keys = keys
        # Name → the replies of its summary when it was last read in full, and when that was.
        self._read: dict[str, tuple[list[Any], float]] = {}
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
                # There is no record: deleted, or a name that `redisacc gc` removes.
                continue
            view, (before, at) = self.views.get(keys.name), self._read.get(keys.name, (None, -math.inf))
            if view is not None:
                views[keys.name] = view
            if view is None or summary is None or summary != before or at < now - LONGEST_REST:
                changed.append(((keys.name not in first, at), keys, summary or []))
            else:
                view.add(dataclasses.replace(view.info, read_at=read_at), view.parameters)
        deadline = clock.now() + budget
        for (is_other, _), keys, summary in sorted(changed, key=lambda entry: entry[0]):
            if is_other and clock.now() >= deadline:
                break
            self._read_whole(keys, summary, views)
        self.views = dict(sorted(views.items()))
        self._read = {name: read for name, read in self._read.items() if name in views}

    def _read_whole(self, keys: Keys, summary: list[Any], views: dict[str, View]) -> None:
        try:
            info = read_info(self._transport, keys)
        except ServerUnavailableError:
            raise
        except RedisAccError as error:
            views.pop(keys.name, None)
            if not isinstance(error, NotFoundError):
                self.problems.append(str(error))
            return
        view = views.setdefault(keys.name, View(info))
        has_parameters = len(summary) < 2 or summary[1][0] is not None
        view.add(info, self._parameters_of(keys) if has_parameters else None)
        self._read[keys.name] = summary, clock.now()

    def _parameters_of(self, keys: Keys) -> ParametersInfo | None:
        try:
            return read_parameters_info(self._transport, ParameterKeys(keys.name))
        except ServerUnavailableError:
            raise
        except RedisAccError as error:
            self.problems.append(str(error))
            return None

    def _summaries(self, wanted: Sequence[Keys]) -> Iterator[tuple[Keys, list[Any] | None, Any]]:
        """Yields the summary of each accumulator, and when it was read; None if the server refused a command of it."""
        for start in range(0, len(wanted), BATCH):
            batch = wanted[start : start + BATCH]
            try:
                replies, read_at = self._ask(summary_commands(keys) for keys in batch)
                yield from ((keys, reply, read_at) for keys, reply in zip(batch, replies, strict=True))
            except ServerUnavailableError:
                raise
            except RedisAccError:
                # A key that is not redisacc's must not hide the other accumulators.
                yield from ((keys, None, None) for keys in batch)

    def _ask(self, groups: Iterable[list[Command]]) -> tuple[list[list[Any]], Any]:
        commands = list(groups)
        *replies, clock = self._transport.pipeline([*itertools.chain.from_iterable(commands), ("TIME",)])
        found = iter(replies)
        return [list(itertools.islice(found, len(group))) for group in commands], time_of(clock_ms(clock))
