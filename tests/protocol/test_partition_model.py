"""The protocol of docs/explanations/partitions.md, checked in every state that it can reach."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from partition_model import PartitionModel, Rules
from state_search import Harm
from support.selection import thorough

RULES = [rule.name for rule in fields(Rules)]
# These matter only if the leader fails over to a replica that lags behind.
FAILOVERS = ["confirmation_before_removal", "names_outlive_failovers"]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("gradients", "attempts", "numbers", "states"),
    thorough([(1, 1, 2, 10_000), (1, 2, 2, 200_000), (2, 1, 1, 200_000)], usual=[(1, 1, 2, 10_000)]),
)
def test_nothing_is_lost_counted_twice_or_left_behind(gradients: int, attempts: int, numbers: int, states: int) -> None:
    # Fewer would mean that the model no longer does most of what it describes.
    assert PartitionModel(gradients, attempts, numbers).run() > states


@pytest.mark.timeout(600)
@pytest.mark.thorough
def test_what_a_replica_knows_is_there_when_it_takes_over() -> None:
    assert PartitionModel(1, 1, fails_over=True).run() > 100_000


@pytest.mark.parametrize("rule", thorough(RULES, usual=["persists", "proof_before_admission"]))
def test_each_rule_is_necessary(rule: str) -> None:
    model = PartitionModel(1, 2, rules=replace(Rules(), **{rule: False}), fails_over=rule in FAILOVERS)
    with pytest.raises(Harm) as caught:
        model.run()
    # The shortest way to the harm, so that one can read it.
    assert 3 <= len(caught.value.steps) <= 15
