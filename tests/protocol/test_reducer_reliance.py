"""For how long a taker does without a reducer that was late."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from redisacc._protocol.sums.reducer_reliance import ReducerReliance


def test_reliance_doubles_its_pauses_and_success_ends_them(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("redisacc._protocol.sums.reducer_reliance.clock", SimpleNamespace(now=lambda: now))
    reliance = ReducerReliance()
    pauses = []
    for _ in range(8):
        assert reliance.relies
        reliance.fail()
        begun = now
        while not reliance.relies:
            now += 0.5
        pauses.append(now - begun)
    assert pauses == [1, 2, 4, 8, 16, 32, 64, 64]
    reliance.fail()
    reliance.succeed()
    assert reliance.relies
