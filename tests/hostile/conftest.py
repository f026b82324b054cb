"""Fixtures of tests that overwrite keys with foreign bytes."""

from __future__ import annotations

import pytest
from foreign import KINDS
from support.memory import limited_memory
from support.selection import IN_PARTS, STORAGES

import redisacc


@pytest.fixture
def little_memory():
    """An allocation of gigabytes, because a forged length says so, is an error here and not a slow machine."""
    with limited_memory(3 * 2**30):
        yield


@pytest.fixture
def opened(request, client):
    """Opens an accumulator of a kind, with two gradients that are stored in one way."""

    def make(kind: str, storage: str) -> redisacc.ConditionalAccumulatorBase:
        if storage in IN_PARTS:
            request.getfixturevalue("force_parts")
        fixture, schema, options, gradient = KINDS[kind]
        acc = request.getfixturevalue(fixture)(
            *schema, limits=redisacc.Limits(in_place=STORAGES[storage]), worker="ann", **options
        )
        for _ in range(2):
            acc.apply_grad(*gradient)
        return acc

    return make
