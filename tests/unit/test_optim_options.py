"""Optimizers: their options, groups, numbers of a step, and the form that travels."""

import json
import math
import pickle
from dataclasses import FrozenInstanceError, fields

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.rows import every_row

from redisacc import optim
from redisacc._format.update_order import Order, pack_scalars, parse_order, unpack_scalars
from redisacc.errors import InvalidArgumentError
from redisacc.optim.algorithms import BY_NAME

# Those that users choose.
KINDS = sorted((kind for kind in BY_NAME.values() if kind.__name__ in optim.__all__), key=lambda kind: kind.name)

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


OUT_OF_RANGE = [
    (optim.SGD, "lr", -1, r"must be a number in \[0, inf\), not -1"),
    *((optim.SGD, "lr", lr, "must be a number") for lr in (math.nan, True, b"0.1", 10**400)),
    *((optim.SGD, "dampening", each, f"must be a number that is finite, not {each}") for each in (math.inf, -math.inf)),
    (optim.SGD, "nesterov", True, "must have a momentum above 0 and dampening=0, not 0 and 0"),
    (optim.SGD, "nesterov", 1, "must be True or False, not 1"),
    (optim.SGD, "maximize", 0, "must be True or False"),
    (optim.SGD, "momentum", -0.1, "must be a number"),
    (optim.Adam, "betas", (0.9, 1), r"\[1\] must be a number in \[0, 1\), not 1"),
    (optim.Adam, "betas", 0.9, r"must be a pair of numbers in \[0, 1\), not 0.9"),
    (optim.Lion, "betas", (0.9,), "must be a pair"),
    (optim.Adam, "eps", -1, "must be a number"),
    (optim.Adam, "amsgrad", None, "must be True or False"),
    (optim.RMSprop, "alpha", 1, r"must be a number in \[0, 1\), not 1"),
    (optim.RMSprop, "centered", "no", "must be True or False"),
    (optim.Adagrad, "initial_accumulator_value", -1, "must be a number"),
    (optim.Adam, "clip_norm", 0, "must be above 0, not 0"),
    (optim.Adam, "clip_norm", -1, "must be a number in"),
    (optim.Adam, "ema", 1, r"must be a number in \[0, 1\), not 1"),
    (optim.Adam, "weight_decay", -1, "must be a number"),
    (optim.Adam, "no_decay", "*", "must be a sequence of patterns such as '[*]/bias', not '[*]'"),
    *(
        (optim.Adam, "no_decay", [*before, wrong], "must be text of 1 to 1024 bytes")
        for before, wrong in (("a", 1), ("", "a" * 1025), ("", "\ud800"))
    ),
    (optim.Adam, "no_decay", ["a"] * 1001, "must have at most 1000 patterns, not 1001"),
    (optim.Adam, "lr_factor", ["a"], "must be a dict of patterns and factors, not"),
    (optim.Adam, "lr_factor", {"a": -1}, r"\['a'\] must be a number in \[0, inf\), not -1"),
]


def test_options_out_of_range_are_refused():
    for kind, name, value, message in OUT_OF_RANGE:
        with pytest.raises(InvalidArgumentError, match=f"{name} ?{message}"):
            pytest.fail(f"{kind(**{name: value})} was made")
    with pytest.raises(InvalidArgumentError, match="nesterov must have a momentum above 0"):
        optim.SGD(nesterov=True, momentum=1, dampening=1)


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

    # Nothing decays anyway.
    for without in (optim.Adam(), optim.Adam(no_decay=["a"])):
        assert without.groups(["a", "b"]) == ((0, 0), 1)


@every_row("options", [{"no_decay": ["*", "*/BIAS"]}, {"lr_factor": {"*": 1, "*/BIAS": 1}}])
def test_a_pattern_that_matches_no_leaf_is_refused(options):
    (name,) = options
    message = rf"pattern '\*/BIAS' of {name} must match the path of a leaf, but matches none of \['0/bias', '0/w'\]"
    with pytest.raises(InvalidArgumentError, match=message):
        optim.Adam(**options).groups(["0/bias", "0/w"])


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


def test_a_schedule_may_return_what_numpy_makes_of_a_step():
    optimizer = optim.SGD(lambda step: np.where(step < 2, 0.1, 0.05))
    assert [optimizer.scalars(step, 1)[0][0] for step in (1, 2)] == [0.1, 0.05]
    assert all(type(each) is float for each in optimizer.scalars(2, 1)[0])


@pytest.mark.parametrize("form", [np.array, np.float64, np.float32, lambda value: np.where(True, value, 0)])
def test_arrays_without_dimensions_are_numbers(form):
    given = {"lr": 0.5, "weight_decay": 0.25, "clip_norm": 2.0, "ema": 0.5, "eps": 0.125}
    wanted = optim.Adam(**given, betas=(0.5, 0.25), lr_factor={"w": 0.5})
    made = {name: form(value) for name, value in given.items()}
    assert optim.Adam(**made, betas=(form(0.5), form(0.25)), lr_factor={"w": form(0.5)}) == wanted
    for wrong in (np.array([0.5]), np.array(True), np.array("0.5"), np.array(0.5j)):
        with pytest.raises(InvalidArgumentError, match="lr must be a number"):
            optim.SGD(wrong)


def test_numbers_of_a_step_that_there_cannot_be():
    for returned in (-1, math.nan, math.inf, None, "0.1"):
        with pytest.raises(InvalidArgumentError, match=r"the result of lr\(3\) must be a number in \[0, inf\), not"):
            optim.SGD(lambda step, returned=returned: returned).scalars(3, 1)
    with pytest.raises(InvalidArgumentError, match=r"step 3 must be finite, but lr=1.5e\+308 makes one"):
        optim.Adam(1.5e308).scalars(3, 1)
    for updates in (0, -1, 1.0, True):
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


@every_row("optimizer", EVERYTHING + [kind() for kind in KINDS])
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
    assert adam.state_matches(optim.Adam(0.5, betas=(0.1, 0.2)))
    assert adam.state_matches(optim.AdamW())
    assert not adam.state_matches(optim.Adam(amsgrad=True))
    assert not adam.state_matches(optim.Adam(ema=0.9))
    assert not optim.SGD(momentum=0.9).state_matches(optim.SGD())
    assert not adam.state_matches(optim.Lion())
    assert not optim.SGD(momentum=0.9).state_matches(optim.RMSprop(momentum=0.9))


GOOD = optim.AdamW(lr_factor={"a": 1}, no_decay=["b"], clip_norm=1).to_config()


CONFIGS = [
    (None, "the config of an optimizer must be a dict, not None"),
    ({}, r"the name of an optimizer must be one of \['adagrad', .*\], not None"),
    ({**GOOD, "name": ["adam"]}, "the name of an optimizer must be one of"),
    ({**GOOD, "name": "sgd"}, "the config of sgd must have the options"),
    ({**GOOD, "more": 1}, "the config of adamw must have the options"),
    ({key: value for key, value in GOOD.items() if key != "eps"}, "the config of adamw must have the options"),
    *(
        ({**GOOD, name: value}, f"{name} must be {message}")
        for name, value, message in (
            *(("eps", eps, "a number") for eps in ("0.1", b"1", True, None, -1.0, math.nan, math.inf, 10**400)),
            ("lr", "rate", "a number"),
            ("amsgrad", 1.0, "True or False"),
            *(("betas", betas, "a pair") for betas in (None, "ab", [0.5], [0.5] * 1001)),
            ("no_decay", None, "a sequence"),
            ("lr_factor", [["a", 0.5]], "a dict"),
        )
    ),
    ({**GOOD, "betas": [0.9, "x"]}, r"betas\[1\] must be a number"),
    ({**GOOD, "no_decay": [None]}, "pattern 0 of no_decay"),
    ({**GOOD, "lr_factor": {"a": "x"}}, r"lr_factor\['a'\] must be a number"),
]


def test_a_config_of_somebody_else_is_refused():
    for config, message in CONFIGS:
        with pytest.raises(InvalidArgumentError, match=message):
            pytest.fail(f"{optim.from_config(config)} was made")


_ANYTHING = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=20) | st.binary(max_size=20),
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
    config = {**optimizer.to_config(), "lr": lr}
    optimizer = optim.from_config(config)
    every = optimizer.scalars(updates, updates)
    assert all(len(scalars) == optimizer.scalars_per_group for scalars in every)
    text = pack_scalars(every)
    assert unpack_scalars(text, optimizer) == every
    assert pack_scalars(unpack_scalars(text, optimizer)) == text


def test_numbers_of_somebody_else_are_refused():
    for text in ("", "1", "nan", "1.0", "1.0;1.0;1.0", "0" * 10**6):
        with pytest.raises(ValueError, match="must be"):
            unpack_scalars(text, optim.Adam())
    for last in ("inf", "1e400", "1.00", "1_0.0", "0x1p0", "1.0;", "1.0\n", "1.0,1.0", "0." + "0" * 30 + "1"):
        with pytest.raises(ValueError, match="must be"):
            unpack_scalars(f"1.0,1.0,{last}", optim.Adam())


def order_of(clip, divisor=3):
    """Returns the order of a step of Adam."""
    return Order("ab-1", "c" * 32, "d" * 32, divisor, clip, optim.Adam().scalars(0, 1))


def test_an_order_keeps_its_bits():
    for divisor, scale in ((0, 0.0), (3, 1.0), (0.1, 0.1), (3e30, 5e-324)):
        order = order_of(scale, divisor)
        assert parse_order(order.event(7), optim.Adam()) == (order, 7)
    clipped, _ = parse_order(order_of(math.nan).event(7), optim.Adam())
    assert math.isnan(clipped.clip)
    for wrong in (order_of(-1.0), order_of(math.nextafter(1, 2)), order_of(math.inf), order_of("NaN"), order_of("1")):
        with pytest.raises(ValueError, match="not"):
            parse_order(wrong.event(7), optim.Adam())
    for divisor in (-0.5, 0.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="not"):
            parse_order(order_of(1.0, divisor).event(7), optim.Adam())


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
