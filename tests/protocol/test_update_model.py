"""How updates are committed, checked in every state that a model of it can reach."""

from dataclasses import fields, replace

import pytest
from state_search import Harm
from support.selection import thorough
from update_model import UpdateModel, UpdateRules

RULES = [rule.name for rule in fields(UpdateRules)]
ONE = {}
OPTIMIZERS = {"chiefs": 2, "optimizers": 2, "late": 0, "collects": False, "numbers": 1}
REPLACED = {"chiefs": 2, "bets": 0, "collects": False, "numbers": 1, "replaces": True}
FAILOVER = {"failover": True, "collects": False, "late": 0, "bets": 0}
LOST = {"chiefs": 2, "bets": 0, "late": 0, "collects": False, "numbers": 1, "loses": True}
COLLECTED = {"failover": True, "late": 0, "bets": 0, "numbers": 1}
# The bounds in which the search finds harm without a rule.
WITHOUT = {
    "follows": REPLACED,
    "refuses_recovered": LOST,
    "optimizer_in_name": OPTIMIZERS,
    "confirms_fences": FAILOVER,
    "takes_numbers": COLLECTED,
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("bounds", "states"),
    thorough(
        [(ONE, 40_000), (OPTIMIZERS, 7_000), (REPLACED, 10_000), (FAILOVER, 7_000), (COLLECTED, 700), (LOST, 3_000)],
        usual=[(FAILOVER, 7_000), (COLLECTED, 700), (LOST, 3_000)],
    ),
)
def test_a_visible_version_is_that_of_its_order_and_no_round_is_used_twice_or_lost(bounds, states):
    # Fewer would mean that the model no longer does most of what it describes.
    assert UpdateModel(**bounds).run() > states


@pytest.mark.parametrize(
    "rule",
    thorough(
        RULES, usual=["writes_only_new", "number_in_name", "optimizer_in_name", "takes_numbers", "refuses_recovered"]
    ),
)
def test_each_rule_is_necessary(rule):
    with pytest.raises(Harm) as caught:
        UpdateModel(**WITHOUT.get(rule, ONE), rules=replace(UpdateRules(), **{rule: False})).run()
    # The shortest way to the harm, so that one can read it.
    assert 3 <= len(caught.value.steps) <= 18
