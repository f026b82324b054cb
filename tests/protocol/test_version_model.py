"""How docs/explanations/partitions.md publishes versions of parameters, checked in every state that it can reach."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from state_search import Harm
from support.selection import thorough
from version_model import VersionModel, VersionRules

RULES = [rule.name for rule in fields(VersionRules)]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("publishers", "tries", "numbers", "states"),
    thorough([(1, 1, 2, 10_000), (1, 2, 2, 150_000), (2, 1, 1, 400_000)], usual=[(1, 1, 2, 10_000)]),
)
def test_the_published_version_is_whole_and_nothing_is_left_behind(
    publishers: int, tries: int, numbers: int, states: int
) -> None:
    # Fewer would mean that the model no longer does most of what it describes.
    assert VersionModel(publishers, tries, numbers).run() > states


@pytest.mark.parametrize("rule", thorough(RULES, usual=["persists", "proof_before_commit"]))
def test_each_rule_is_necessary(rule: str) -> None:
    # A version that was replaced, and comes back, needs somebody who replaces it.
    publishers, tries, numbers = (2, 1, 1) if rule == "follows" else (1, 2, 2)
    with pytest.raises(Harm) as caught:
        VersionModel(publishers, tries, numbers, replace(VersionRules(), **{rule: False})).run()
    # The shortest way to the harm, so that one can read it.
    assert 3 <= len(caught.value.steps) <= 18
