"""Optimisers: their options, groups, numbers of a step, and the form that travels."""

from __future__ import annotations

import json
import math
import pickle
from dataclasses import FrozenInstanceError, fields

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from redisacc import optim
from redisacc.errors import InvalidArgumentError
from redisacc.optim.algorithms import BY_NAME
from redisacc.optim.scalars import pack_scalars, pack_scale, unpack_scalars, unpack_scale

KINDS = sorted(BY_NAME.values(), key=lambda kind: kind.name)

# Every option differs from its default.
EVERYTHING = [
    optim.SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.1, maximize=True, no_decay=["*/b", "c"], clip_norm=2),
    optim.SGD(0.1, momentum=0.9, dampening=-0.5, lr_factor={"a": 0.3, "*": 1 / 3}, ema=0.999),
    optim.Adam(0.1, betas=(0.1, 0.2), eps=1e-3, amsgrad=True, weight_decay=1, ema=0.1),
    optim.AdamW(0.1, betas=(0.1, 0.2), eps=1e-3, amsgrad=True, weight_decay=0),
    optim.Adagrad(0.1, lr_decay=0.1, initial_accumulator_value=0.3, eps=0),
    optim.RMSprop(0.1, alpha=0.1, eps=0, momentum=0.1, centered=True),
    optim.Lion(0.1, betas=(0.1, 0.2)),
]


@pytest.mark.parametrize(
    ("optimizer", "slots"),
    [
        (optim.SGD(), ()),
        (optim.SGD(momentum=0.9), ("momentum_buffer",)),
        (optim.Adam(), ("exp_avg", "exp_avg_sq")),
        (optim.AdamW(amsgrad=True, ema=0.9), ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "ema")),
        (optim.Adagrad(), ("sum",)),
        (optim.RMSprop(), ("square_avg",)),
        (optim.RMSprop(momentum=0.1), ("square_avg", "momentum_buffer")),
        (optim.RMSprop(centered=True), ("square_avg", "grad_avg")),
        (optim.RMSprop(momentum=0.1, centered=True), ("square_avg", "momentum_buffer", "grad_avg")),
        (optim.Lion(), ("exp_avg",)),
    ],
)
def test_there_is_no_state_that_the_options_do_not_need(optimizer, slots):
    assert optimizer.slots == slots


def test_names():
    assert [kind.name for kind in KINDS] == ["adagrad", "adam", "adamw", "lion", "rmsprop", "sgd"]


def test_what_slots_hold_at_first():
    weights = np.arange(6, dtype=np.float32).reshape(2, 3)
    adagrad = optim.Adagrad(initial_accumulator_value=0.1, ema=0.9)
    for slot, expected in (("sum", np.full((2, 3), 0.1, np.float32)), ("ema", weights)):
        first = adagrad.initial(slot, weights)
        assert first.dtype == np.float32
        assert not np.shares_memory(first, weights)
        np.testing.assert_array_equal(first, expected)
    assert not optim.Adam().initial("exp_avg", weights).any()
    with pytest.raises(InvalidArgumentError, match=r"slot must be one of \['sum', 'ema'\] for adagrad, not 'exp_avg'"):
        adagrad.initial("exp_avg", weights)


def test_an_optimizer_does_not_change():
    patterns, factors = ["b"], {"a": 0.5}
    optimizer = optim.AdamW(no_decay=patterns, lr_factor=factors)
    patterns.append("c")
    factors["d"] = 1
    assert optimizer == optim.AdamW(no_decay=["b"], lr_factor={"a": 0.5})
    assert hash(optimizer) == hash(optim.AdamW(no_decay=["b"], lr_factor={"a": 0.5}))
    with pytest.raises(FrozenInstanceError):
        optimizer.lr = 1
    with pytest.raises(TypeError):
        optim.AdamW(1e-3, 0.1)
    with pytest.raises(TypeError):
        optim.Optimizer(1e-3)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: optim.SGD(-1), r"lr must be a number in \[0, inf\), not -1"),
        (lambda: optim.SGD(math.nan), "lr must be a number"),
        (lambda: optim.SGD(True), "lr must be a number"),
        (lambda: optim.SGD("0.1"), "lr must be a number"),
        (lambda: optim.SGD(10**400), "lr must be a number"),
        (lambda: optim.SGD(dampening=math.inf), "dampening must be a number that is finite, not inf"),
        (lambda: optim.SGD(dampening=-math.inf), "dampening must be a number that is finite, not -inf"),
        (lambda: optim.SGD(nesterov=True), "nesterov must have a momentum above 0 and dampening=0, not 0 and 0"),
        (lambda: optim.SGD(nesterov=True, momentum=1, dampening=1), "nesterov must have a momentum above 0"),
        (lambda: optim.SGD(nesterov=1), "nesterov must be True or False, not 1"),
        (lambda: optim.SGD(maximize=0), "maximize must be True or False"),
        (lambda: optim.SGD(momentum=-0.1), "momentum must be a number"),
        (lambda: optim.Adam(betas=(0.9, 1)), r"betas\[1\] must be a number in \[0, 1\), not 1"),
        (lambda: optim.Adam(betas=0.9), r"betas must be a pair of numbers in \[0, 1\), not 0.9"),
        (lambda: optim.Lion(betas=(0.9,)), "betas must be a pair"),
        (lambda: optim.Adam(eps=-1), "eps must be a number"),
        (lambda: optim.Adam(amsgrad=None), "amsgrad must be True or False"),
        (lambda: optim.RMSprop(alpha=1), r"alpha must be a number in \[0, 1\), not 1"),
        (lambda: optim.RMSprop(centered="no"), "centered must be True or False"),
        (lambda: optim.Adagrad(initial_accumulator_value=-1), "initial_accumulator_value must be a number"),
        (lambda: optim.Adam(clip_norm=0), "clip_norm must be above 0, not 0"),
        (lambda: optim.Adam(clip_norm=-1), "clip_norm must be a number in"),
        (lambda: optim.Adam(ema=1), r"ema must be a number in \[0, 1\), not 1"),
        (lambda: optim.Adam(weight_decay=-1), "weight_decay must be a number"),
        (lambda: optim.Adam(no_decay="*"), "no_decay must be a sequence of patterns such as '[*]/bias', not '[*]'"),
        (lambda: optim.Adam(no_decay=["a", 1]), "pattern 1 of no_decay must be text of 1 to 1024 bytes, not 1"),
        (lambda: optim.Adam(no_decay=["a" * 1025]), "pattern 0 of no_decay must be text of 1 to 1024 bytes"),
        (lambda: optim.Adam(no_decay=["\ud800"]), "pattern 0 of no_decay must be text of 1 to 1024 bytes"),
        (lambda: optim.Adam(no_decay=["a"] * 1001), "no_decay must have at most 1000 patterns, not 1001"),
        (lambda: optim.Adam(lr_factor=["a"]), "lr_factor must be a dict of patterns and factors, not"),
        (lambda: optim.Adam(lr_factor={"a": -1}), r"lr_factor\['a'\] must be a number in \[0, inf\), not -1"),
    ],
)
def test_options_out_of_range_are_refused(make, message):
    with pytest.raises(InvalidArgumentError, match=message):
        make()


def test_the_names_of_slots_say_whose_state_they_are():
    made = {"adam": {"adam", "adamw"}, "adamw": {"adam", "adamw"}}
    for kind in KINDS:
        for optimizer in [kind(), *(each for each in EVERYTHING if type(each) is kind)]:
            if optimizer.slots:
                same = {each.name for each in EVERYTHING + [kind() for kind in KINDS] if each.slots == optimizer.slots}
                assert same <= made.get(kind.name, {kind.name})


# Groups.


def test_leaves_of_one_learning_rate_and_decay_share_a_group():
    optimizer = optim.AdamW(1.0, no_decay=["*/b"], lr_factor={"head/*": 0.5, "*/slow": 0.1, "other/*": 0.5})
    paths = ["0/b", "0/w", "1/b", "1/w", "head/b", "head/slow", "x/slow", "other/w"]
    groups, number = optimizer.groups(paths)
    assert number == optimizer.num_groups == len(optimizer.scalars(0, 1)) == 6
    of = dict(zip(paths, groups, strict=True))
    assert of["0/b"] == of["1/b"]
    assert of["0/w"] == of["1/w"]
    # The first pattern that matches counts.
    assert of["head/slow"] == of["other/w"]
    assert len(set(groups)) == 5
    every = [optimizer.scalars(0, 1)[of[path]] for path in ("0/w", "0/b", "head/b", "head/slow", "x/slow")]
    rates = (1, 1, 0.5, 0.5, 0.1)
    assert [(size * (1 - 0.9), shrink) for size, _, shrink in every] == [
        (pytest.approx(rate), 1 if decay == 0 else 1 - rate * 0.01)
        for rate, decay in zip(rates, (1, 0, 0, 1, 1), strict=True)
    ]


def test_an_optimizer_without_patterns_has_one_group():
    assert optim.Adam().groups(["a", "b"]) == ((0, 0), 1)
    # Nothing decays anyway.
    assert optim.Adam(no_decay=["a"]).groups(["a", "b"]) == ((0, 0), 1)


@pytest.mark.parametrize("options", [{"no_decay": ["*", "*/biass"]}, {"lr_factor": {"*": 1, "*/biass": 1}}])
def test_a_pattern_that_matches_no_leaf_is_refused(options):
    (name,) = options
    with pytest.raises(
        InvalidArgumentError,
        match=rf"pattern '\*/biass' of {name} must match the path of a leaf, but matches none of \['0/bias', '0/w'\]",
    ):
        optim.Adam(**options).groups(["0/bias", "0/w"])


def test_a_pattern_tells_upper_from_lower_case():
    with pytest.raises(InvalidArgumentError, match="must match"):
        optim.Adam(no_decay=["B"]).groups(["b"])


# The numbers of a step.


def test_the_schedule_gets_the_step_and_bias_correction_the_updates():
    seen = []

    def schedule(step):
        seen.append(step)
        return np.float32(0.5)

    ((size, bias, decay),) = optim.Adam(schedule, weight_decay=0.25).scalars(7, 2)
    assert (size, bias, decay) == (0.5 / (1 - 0.9**2), (1 - 0.999**2) ** 0.5, 0.25)
    assert seen == [7]
    assert all(type(each) is float for each in (size, bias, decay))


@pytest.mark.parametrize("returned", [-1, math.nan, math.inf, None, "0.1"])
def test_a_schedule_must_return_a_number(returned):
    with pytest.raises(InvalidArgumentError, match=r"what lr\(3\) returns must be a number in \[0, inf\), not"):
        optim.SGD(lambda step: returned).scalars(3, 1)


def test_numbers_that_overflow_are_refused():
    with pytest.raises(InvalidArgumentError, match=r"step 3 must be finite, but lr=1.5e\+308 makes one"):
        optim.Adam(1.5e308).scalars(3, 1)


@pytest.mark.parametrize("updates", [0, -1, 1.0, True])
def test_updates_count_from_1(updates):
    with pytest.raises(InvalidArgumentError, match="updates must be"):
        optim.Adam().scalars(0, updates)


def test_the_scale_of_a_clipping():
    clipped = optim.SGD(clip_norm=2)
    assert clipped.clip_scale(25.0) == 2 / (5 + 1e-6)
    assert clipped.clip_scale(0.0) == 1
    assert clipped.clip_scale(3.9) == 1
    assert clipped.clip_scale(math.inf) == 0
    assert math.isnan(clipped.clip_scale(math.nan))
    assert optim.SGD().clip_scale(math.nan) == 1


# The form that travels.


@pytest.mark.parametrize("optimizer", EVERYTHING + [kind() for kind in KINDS], ids=lambda each: each.name)
def test_a_config_makes_an_equal_optimizer(optimizer):
    config = optimizer.to_config()
    for passed in (config, json.loads(json.dumps(config)), msgpack.unpackb(msgpack.packb(config))):
        again = optim.from_config(passed)
        assert type(again) is type(optimizer)
        assert again == optimizer
        assert list(again.lr_factor) == list(optimizer.lr_factor)
        assert again.to_config() == config
    assert pickle.loads(pickle.dumps(optimizer)) == optimizer


def test_between_them_the_examples_change_every_option():
    for kind in KINDS:
        changed = {
            each.name
            for each in fields(kind)
            for optimizer in EVERYTHING
            if isinstance(optimizer, kind) and getattr(optimizer, each.name) != getattr(kind(), each.name)
        }
        common = {each.name for each in fields(optim.Optimizer)} - {"lr"}
        assert {each.name for each in fields(kind)} - common <= changed


def test_a_schedule_stays_with_the_chief():
    optimizer = optim.AdamW(lambda step: 0.1, eps=1e-3)
    config = optimizer.to_config()
    assert config["lr"] is None
    again = optim.from_config(config)
    assert again == optim.from_config(config)
    assert again.to_config() == config
    assert again.slots == optimizer.slots
    with pytest.raises(InvalidArgumentError, match="the learning rate of step 3 is unknown here: lr is a function"):
        again.scalars(3, 1)


def test_whose_state_can_continue():
    adam = optim.Adam()
    assert adam.state_matches(optim.Adam(0.5, betas=(0.1, 0.2)).to_config())
    assert adam.state_matches(optim.AdamW().to_config())
    assert not adam.state_matches(optim.Adam(amsgrad=True).to_config())
    assert not adam.state_matches(optim.Adam(ema=0.9).to_config())
    assert not optim.SGD(momentum=0.9).state_matches(optim.SGD().to_config())
    assert not adam.state_matches(optim.Lion().to_config())
    assert not optim.SGD(momentum=0.9).state_matches(optim.RMSprop(momentum=0.9).to_config())
    with pytest.raises(InvalidArgumentError):
        adam.state_matches({})


GOOD = optim.AdamW(lr_factor={"a": 1}, no_decay=["b"], clip_norm=1).to_config()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, "the config of an optimizer must be a dict, not None"),
        ([], "must be a dict"),
        ({}, r"the name of an optimizer must be one of \['adagrad', .*\], not None"),
        ({**GOOD, "name": ["adam"]}, "the name of an optimizer must be one of"),
        ({**GOOD, "name": "adam "}, "the name of an optimizer must be one of"),
        ({**GOOD, "name": "sgd"}, "the config of sgd must have the options"),
        ({**GOOD, "more": 1}, "the config of adamw must have the options"),
        ({key: value for key, value in GOOD.items() if key != "eps"}, "the config of adamw must have the options"),
        ({**GOOD, "eps": 0.1}, "in the config of adamw, eps must be a finite number as float.hex writes it, not 0.1"),
        ({**GOOD, "eps": "0x1p-4"}, "eps must be a finite number as float.hex writes it"),
        ({**GOOD, "eps": "0x1.0000000000000p+9999"}, "eps must be a finite number"),
        ({**GOOD, "eps": "nan"}, "eps must be a finite number"),
        ({**GOOD, "eps": "0x1." + "0" * 10**6}, "eps must be a finite number"),
        ({**GOOD, "eps": True}, "eps must be a number"),
        ({**GOOD, "eps": None}, "eps must be a number"),
        ({**GOOD, "eps": (-1.0).hex()}, "eps must be a number"),
        ({**GOOD, "eps": b"0x1.0000000000000p+0"}, "eps must be a finite number"),
        ({**GOOD, "amsgrad": (1.0).hex()}, "amsgrad must be True or False"),
        ({**GOOD, "betas": None}, "betas must be a list of at most 1000 entries, not None"),
        ({**GOOD, "betas": [0.9, 0.999]}, "betas must be a finite number"),
        ({**GOOD, "betas": [(0.5).hex()]}, "betas must be a pair"),
        ({**GOOD, "betas": [(0.5).hex()] * 1001}, "betas must be a list of at most 1000 entries"),
        ({**GOOD, "no_decay": None}, "no_decay must be a sequence"),
        ({**GOOD, "no_decay": [None]}, "pattern 0 of no_decay"),
        ({**GOOD, "lr_factor": {"a": (0.5).hex()}}, "lr_factor must be a list of at most 1000 entries"),
        ({**GOOD, "lr_factor": [["a"]]}, r"lr_factor must have pairs of a pattern and a factor, not \['a'\]"),
        ({**GOOD, "lr_factor": [[["a"], (0.5).hex()]]}, "lr_factor must have pairs"),
        ({**GOOD, "lr_factor": [["a", 0.5]]}, "lr_factor must be a finite number"),
    ],
)
def test_a_config_of_somebody_else_is_refused(config, message):
    with pytest.raises(InvalidArgumentError, match=message):
        optim.from_config(config)


_ANYTHING = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=20) | st.binary(max_size=20)
    | st.floats(allow_nan=False, allow_infinity=False).map(float.hex),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)  # fmt: skip


@given(st.sampled_from(KINDS), st.data())
def test_any_config_is_taken_or_refused(kind, data):
    config = kind().to_config()
    for key in data.draw(st.lists(st.sampled_from(sorted(config)), max_size=3)):
        config[key] = data.draw(_ANYTHING)
    try:
        optimizer = optim.from_config(config)
    except InvalidArgumentError:
        return
    assert optim.from_config(optimizer.to_config()) == optimizer


# Numbers as text.


@given(st.sampled_from(EVERYTHING), st.floats(0, 1e30), st.integers(1, 10**7))
def test_the_numbers_of_a_step_keep_their_bits(optimizer, lr, updates):
    config = {**optimizer.to_config(), "lr": lr.hex()}
    optimizer = optim.from_config(config)
    every = optimizer.scalars(updates, updates)
    assert all(len(scalars) == optimizer.scalars_per_group for scalars in every)
    text = pack_scalars(every)
    assert unpack_scalars(text, optimizer) == every
    assert pack_scalars(unpack_scalars(text, optimizer)) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1.0",
        "nan",
        "0x1.0000000000000p+0",
        "0x1.0000000000000p+0,0x1.0000000000000p+0,inf",
        "0x1.0000000000000p+0,0x1.0000000000000p+0,0x1.0000000000000p+9999",
        "0x1.0000000000000p+0,0x1.0000000000000p+0,0x1.0p+0",
        "0x1.0000000000000p+0,0x1.0000000000000p+0,0x1.0000000000000p+0;",
        "0x1.0000000000000p+0;0x1.0000000000000p+0;0x1.0000000000000p+0",
        "0x1.0000000000000p+0,0x1.0000000000000p+0,0x1.0000000000000p+0\n",
        "0x1.0000000000000p+0,0x1.0000000000000p+0,0x1.0000000000000p+0,0x1.0000000000000p+0",
        "0" * 10**6,
    ],
)
def test_numbers_of_somebody_else_are_refused(text):
    with pytest.raises(ValueError, match="must be"):
        unpack_scalars(text, optim.Adam())


@given(st.text(alphabet="0123456789abcdefpx+-.,;in", max_size=100))
def test_any_text_of_numbers_is_taken_or_refused(text):
    optimizer = optim.RMSprop(weight_decay=0.1, no_decay=["b"])
    try:
        every = unpack_scalars(text, optimizer)
    except ValueError:
        return
    assert pack_scalars(every) == text


@pytest.mark.parametrize("scale", [0.0, 1.0, 0.1, 5e-324])
def test_the_scale_of_a_clipping_keeps_its_bits(scale):
    assert unpack_scale(pack_scale(scale)) == scale


def test_a_scale_may_be_nan_but_nothing_else():
    assert math.isnan(unpack_scale(pack_scale(math.nan)))
    for text in ("-0x1.0000000000000p+0", "0x1.0000000000001p+0", "inf", "NaN", "", "1"):
        with pytest.raises(ValueError, match="must be"):
            unpack_scale(text)


def test_the_learning_rate_may_be_a_metric_of_the_gradients():
    optimizer = optim.AdamW("rate", lr_factor={"b": 0.5})
    found = optimizer.scalars(7, 3, {"rate": 0.02, "loss": 1.0})
    assert found == optim.AdamW(0.02, lr_factor={"b": 0.5}).scalars(7, 3)
    assert optimizer.scalars_ahead(7, 3) is None
    assert optim.AdamW(0.02).scalars_ahead(7, 3) == optim.AdamW(0.02).scalars(7, 3)
    # It is no part of what travels.
    assert optimizer.to_config()["lr"] is None
    with pytest.raises(
        InvalidArgumentError, match=r"metric rate, which no gradient of step 7 has: pass it to apply\(\), as metrics="
    ):
        optimizer.scalars(7, 3)
    with pytest.raises(InvalidArgumentError, match="metric rate, the learning rate of step 7, must be a number"):
        optimizer.scalars(7, 3, {"rate": -1.0})
    with pytest.raises(InvalidArgumentError, match="the name of a metric must be"):
        optim.AdamW("learning rate")
