"""How attempts become real, in a round and in a record, checked in every state that the model of it can reach."""

from dataclasses import fields, replace

import pytest
from attempt_model import AttemptModel, Rules
from state_search import Harm
from support.selection import thorough

RULES = [rule.name for rule in fields(Rules)]
ROUND = {}
NODES = {"slots": 2, "tries": 1}
FAILOVER = {**NODES, "fails_over": True}
COMPACTION = {"compacts": True, "tries": 1}
# The bounds in which the search finds harm without a rule.
WITHOUT = {
    **dict.fromkeys(["renewal_needs_lease", "lease_at_commit", "numbers_are_used_once", "fence_before_removal"], NODES),
    "asks_after_listing": NODES,
    "removes_only_with_proof": {"forgets": True},
    "same_incarnation": {"deletes": True, "tries": 1},
    "replaces_what_is_there": COMPACTION,
    "frees_what_was_swapped": COMPACTION,
    "names_outlive_failovers": {**FAILOVER, "tries": 2, "late": 0},
    "confirmation_before_removal": FAILOVER,
    "asks_again": FAILOVER,
    "follows": {"pointer": "record"},
    "names_what_is_retired": {**FAILOVER, "pointer": "record"},
}
USUAL = [({"forgets": True}, 4_000), (COMPACTION, 1_500), ({"pointer": "record"}, 2_000)]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("bounds", "states"),
    thorough(
        [
            *USUAL,
            ({"makers": 2, "tries": 1}, 3_000),
            ({"deletes": True}, 4_000),
            ({**COMPACTION, "makers": 2}, 40_000),
            ({"slots": 2}, 300_000),
            ({**NODES, "compacts": True, "late": 0}, 15_000),
            ({**NODES, "deletes": True}, 15_000),
            ({**NODES, "forgets": True}, 10_000),
            (FAILOVER, 60_000),
            ({"pointer": "record", "makers": 2, "tries": 1}, 4_000),
            ({"pointer": "record", "slots": 2}, 400_000),
            ({**FAILOVER, "pointer": "record"}, 90_000),
        ],
        usual=USUAL,
    ),
    ids=str,
)
def test_what_is_real_has_its_parts_and_nothing_is_counted_twice_or_left_behind(bounds, states):
    # Fewer would mean that the model no longer does most of what it describes.
    assert AttemptModel(**bounds).run() > states


@pytest.mark.timeout(600)
@pytest.mark.parametrize("rule", thorough(RULES, usual=[rule for rule in RULES if rule not in WITHOUT]))
def test_each_rule_is_necessary(rule):
    with pytest.raises(Harm) as caught:
        AttemptModel(**WITHOUT.get(rule, ROUND), rules=replace(Rules(), **{rule: False})).run()
    # The shortest way to the harm, so that one can read it.
    assert 3 <= len(caught.value.steps) <= 20
