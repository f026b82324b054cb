"""Everything that is watched on a server: the state of accumulators, their rounds, and the server itself."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Sequence

from redisacc._format.keys import Keys, ParameterKeys
from redisacc._monitoring.collector import Collector
from redisacc._monitoring.nodes import Node, read_nodes
from redisacc._monitoring.round_history import Figures
from redisacc._monitoring.round_listener import RoundListener
from redisacc._monitoring.step_history import StepHistory
from redisacc._monitoring.view import View
from redisacc._redis.transport import Transport, limited
from redisacc.errors import RedisAccError, ServerUnavailableError


class Monitor:
    """Reads accumulators whenever it is asked to, and listens to their events in between. Close it with ``close()``.

    One thread at a time may use it.

    Args:
        transport: the way to the server.
        patterns: globs of the names of accumulators.
        keys: the keys of further accumulators.

    Attributes:
        figures: accumulator's name → what is known of its rounds, as of the latest refresh.
        histories: accumulator's name → the steps of its training; of those that were read first in the latest refresh.
        nodes: the server, or the masters of a cluster, as of the latest refresh.
    """

    def __init__(self, transport: Transport, patterns: Sequence[str], keys: Sequence[Keys] = ()) -> None:
        self._transport = transport
        self._patterns, self._keys = patterns, keys
        self._collector = Collector(transport, patterns, keys)
        self._listener: RoundListener | None = None
        self.figures: dict[str, Figures] = {}
        self.histories: dict[str, StepHistory] = {}
        self.nodes: list[Node] = []
        # Later, if the server does not answer yet.
        with contextlib.suppress(RedisAccError):
            self._listen()

    @property
    def views(self) -> dict[str, View]:
        """Accumulator's name → its view, sorted by name, as of the latest refresh."""
        return self._collector.views

    @property
    def problems(self) -> list[str]:
        """What is wrong with accumulators that could not be read in the latest refresh. May contain foreign text."""
        return self._collector.problems

    def refresh(self, *, timeout: float = math.inf, budget: float = math.inf, first: Collection[str] = ()) -> None:
        """Reads the server, as ``Collector.refresh`` does.

        Raises:
            ServerUnavailableError: the server does not answer. Everything is as it was.
            RedisAccError: the server refuses.
        """
        self._collector.refresh(timeout=timeout, budget=budget, first=first)
        listener = self._listen()
        listener.follow(list(self.views))
        self.figures = {name: listener.figures(name) for name in self.views}
        with limited(timeout):
            self._read_histories(first)
        self.nodes = read_nodes(self._transport, timeout=min(timeout, 30.0))

    def close(self) -> None:
        """Stops listening. Closing twice does nothing."""
        if self._listener is not None:
            self._listener.close()

    def _read_histories(self, names: Collection[str]) -> None:
        self.histories = {name: of for name, of in self.histories.items() if name in names}
        for name in names:
            view = self.views.get(name)
            if view is None or view.parameters is None:
                self.histories.pop(name, None)
                continue
            history = self.histories.setdefault(name, StepHistory(self._transport, ParameterKeys(name)))
            try:
                history.refresh(view.parameters)
            except ServerUnavailableError:
                raise
            except RedisAccError as error:
                self.problems.append(str(error))

    def _listen(self) -> RoundListener:
        if self._listener is None:
            self._listener = RoundListener(self._transport, self._patterns, [of.name for of in self._keys])
        return self._listener
