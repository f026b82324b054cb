"""Signatures: options are stated once, all of them are shown, and there are never more than twelve."""

import inspect
import pydoc
import re

import pytest
from support.rows import every_row

import redisacc
import redisacc.asyncio
from redisacc import embedded, optim, raw_ops
from redisacc.types import AccumulatorOptions, GradientOptions, TrainingOptions

MOST = 12
ACCUMULATORS = ("ConditionalAccumulator", "SparseConditionalAccumulator", "TreeAccumulator")


def options_of(function):
    """Returns the keyword-only parameters."""
    parameters = inspect.signature(function).parameters.values()
    return [each.name for each in parameters if each.kind is inspect.Parameter.KEYWORD_ONLY]


# They pass on what is somebody else's.
PASS_ON = ("embedded.Server.client", "embedded.Cluster.client", "asyncio.ConditionalAccumulatorBase")


def public_functions():
    for module in (redisacc, redisacc.asyncio, embedded, optim, raw_ops):
        for name in module.__all__:
            thing = getattr(module, name)
            if not callable(thing) or (inspect.isclass(thing) and issubclass(thing, BaseException)):
                continue
            yield f"{module.__name__}.{name}", thing
            if inspect.isclass(thing):
                for method, value in inspect.getmembers(thing, inspect.isroutine):
                    if not method.startswith("_") and thing.__module__.startswith("redisacc"):
                        yield f"{module.__name__}.{name}.{method}", value


def test_no_function_has_more_options_than_anybody_can_read():
    found = dict(public_functions())
    assert len(found) > 200
    for name, function in found.items():
        assert len(options_of(function)) <= MOST, name
        kinds = {each.kind for each in inspect.signature(function).parameters.values()}
        # None is hidden behind **options.
        assert inspect.Parameter.VAR_KEYWORD not in kinds or name.endswith(PASS_ON), name


@every_row("module", [redisacc, redisacc.asyncio])
@every_row("name", ACCUMULATORS)
def test_every_accumulator_has_the_same_options(module, name):
    assert options_of(getattr(module, name)) == list(AccumulatorOptions.__annotations__)
    assert options_of(redisacc.TreeAccumulator.like) == list(AccumulatorOptions.__annotations__)
    for option in AccumulatorOptions.__annotations__:
        assert re.search(f"[ (]{option}: ['\"]", pydoc.render_doc(getattr(module, name)))
        assert f"        {option}: " in (redisacc.ConditionalAccumulatorBase.__doc__ or "")


def test_a_training_and_its_halves_describe_their_options():
    assert set(TrainingOptions.__annotations__) < set(options_of(redisacc.Training))
    for option in options_of(redisacc.Training):
        assert f"        {option}: " in (redisacc.Training.__doc__ or "")
    for option in options_of(redisacc.Chief):
        assert f"        {option}: " in (redisacc.Chief.__doc__ or "")
    for option in set(GradientOptions.__annotations__) - {"finite", "limits"}:
        assert f"``{option}``" in (redisacc.Chief.__doc__ or "")


@every_row(
    "call, name",
    [
        (lambda: redisacc.ConditionalAccumulator("float32", [2], stalness=2), "ConditionalAccumulator"),
        (lambda: redisacc.Chief("t", {}, stalness=2), "Chief"),
        (lambda: redisacc.Training("t", {}, stalness=2), "Training"),
        (lambda: redisacc.Training("t", {}, optimizer=optim.SGD(1.0), accumulator={"stalness": 2}), "accumulator=dict"),
    ],
)
def test_an_option_that_there_is_not(call, name):
    with pytest.raises(TypeError, match=rf"^{name}\(\) got an unexpected keyword argument 'stalness'$"):
        call()


def test_options_of_a_training_that_are_no_dict():
    with pytest.raises(redisacc.InvalidArgumentError, match=r"accumulator must be a dict of options, .* not \['w'\]"):
        redisacc.Training("t", {}, optimizer=optim.SGD(1.0), accumulator=["w"])
    with pytest.raises(redisacc.InvalidArgumentError, match="finite is an option of Worker"):
        redisacc.Chief("t", {}, accumulator={"finite": True})


@every_row("name", ["mean", "limits"])
def test_a_group_of_a_training_that_is_none(name):
    with pytest.raises(redisacc.InvalidArgumentError, match=rf"^{name} must be a redisacc\.\w+ or None, not 7"):
        redisacc.ConditionalAccumulator("float32", [2], **{name: 7})
    for optimizer in (optim.SGD(1.0), None):
        with pytest.raises(redisacc.InvalidArgumentError, match=rf"^{name} must be a redisacc\.\w+ or None"):
            redisacc.Chief("t", {}, workers=1, optimizer=optimizer, accumulator={name: "count"})
