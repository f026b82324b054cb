"""A server that stops answering at the worst moment: the outcome is unknown, and the caller can continue."""

import contextlib
import re

import numpy as np
import pytest
from support.leaks import leftovers
from support.proxy import Fault
from support.servers import CLUSTER

import redisacc

pytestmark = pytest.mark.servers("valkey", CLUSTER)

LIMITS = {"in_place": 10**9, "buffered": 0}


@pytest.fixture(params=LIMITS)
def both(request, proxy, real_client):
    """A handle through the proxy, and one that bypasses it."""
    options = {"reduction_type": "SUM", "limits": redisacc.Limits(in_place=LIMITS[request.param])}
    direct = redisacc.ConditionalAccumulator("float32", [4], "w", redis=real_client, **options)
    through = redisacc.ConditionalAccumulator("float32", [4], "w", redis=proxy.where, **options)
    # The server knows all scripts, and the handle is connected.
    through.apply_grad(np.ones(4))
    through.take_grad(1)
    through.set_global_step(0)
    yield through, direct
    direct.delete()
    assert leftovers(real_client) == []


@pytest.fixture
def silence(proxy, durations):
    """Lets nothing pass from one message on, by default the first: the request never arrives, or the reply doesn't.

    Handles give up on it soon.
    """

    @contextlib.contextmanager
    def from_message(direction, number=0, patience=0.4):
        proxy.arm(Fault(direction, number, 0, "stall"))
        with durations(call=patience):
            yield
        assert proxy.happened()
        proxy.resume()

    return from_message


@pytest.mark.parametrize("direction", ["request", "reply"])
def test_an_apply_without_reply_is_finished_by_settle(both, direction, silence):
    through, direct = both
    with (
        silence(direction),
        pytest.raises(
            redisacc.OutcomeUnknownError,
            match=r"unknown whether .*\. settle\(\) of this error sends the same request again",
        ) as failure,
    ):
        through.apply_grad(np.full(4, 2.0))
    assert isinstance(failure.value, redisacc.ServerUnavailableError)
    # The handle continues meanwhile, and its requests do no harm.
    for _ in range(3):
        assert through.apply_grad(np.full(4, 100.0))
    for _ in range(2):
        assert failure.value.settle().outcome == "applied"
    assert direct.info().applied == 1 + 3 + 1
    assert direct.take_grad(4).tolist() == [302.0] * 4
    # Its round is over; it stays counted, and is not counted again.
    assert failure.value.settle().outcome == "applied"
    assert direct.num_accumulated() == 0


def test_settle_says_what_has_become_stale(proxy, both, silence):
    through, direct = both
    # It never arrives, which only this test knows.
    with silence("request"):
        with pytest.raises(redisacc.OutcomeUnknownError) as failure:
            through.apply_grad(np.ones(4))
        # On a busy machine the handle may give up before its request has come as far as the proxy.
        assert proxy.happened()
        proxy.cut_all()
        direct.set_global_step(1)
    assert failure.value.settle().outcome == "stale"
    assert direct.num_accumulated() == 0


def test_what_never_left_is_not_unknown(proxy, both, durations):
    through, direct = both
    proxy.close()
    with durations(call=0.4):
        # The first of these finds the existing connection broken.
        with pytest.raises(redisacc.ServerUnavailableError):
            through.num_accumulated()
        with pytest.raises(redisacc.ServerUnavailableError) as failure:
            through.apply_grad(np.ones(4))
    assert not isinstance(failure.value, redisacc.OutcomeUnknownError)
    assert direct.num_accumulated() == 0


def test_a_step_without_reply_is_set_once(both, silence):
    through, direct = both
    with silence("reply"), pytest.raises(redisacc.OutcomeUnknownError) as failure:
        through.set_global_step(7)
    direct.apply_grad(np.ones(4), local_step=7)
    direct.take_grad(1)
    failure.value.settle()
    assert direct.global_step() == 8


def acknowledgement(proxy):
    """Returns the number of the request that acknowledges, in a take."""
    return len(proxy.lengths["request"]) - 1


@pytest.mark.parametrize(("direction", "listed"), [("request", 1), ("reply", 0)])
def test_a_round_in_memory_is_delivered_by_settle(proxy, both, direction, listed, durations):
    through, direct = both

    def take():
        direct.apply_grad(np.full(4, 5.0), local_step=direct.global_step())
        return through.take_grad(1)

    take()
    proxy.arm(None)
    assert take().tolist() == [5.0] * 4
    # A request that was held goes on to the server after resume(), and would be numbered: so one fault for a proxy.
    proxy.arm(Fault(direction, acknowledgement(proxy), 0, "stall"))
    with (
        durations(call=1.5),
        pytest.raises(
            redisacc.OutcomeUnknownError,
            match=r"has been read, but the server stopped .*\. settle\(\) of this error acknowledges it; until then",
        ) as failure,
    ):
        take()
    # The server has executed it when its reply is at the proxy, which may be after the handle has given up.
    assert proxy.happened()
    assert len(direct.info().unacknowledged) == listed
    proxy.resume()
    assert failure.value.settle().tolist() == [5.0] * 4
    assert direct.info().unacknowledged == []


def test_a_block_whose_acknowledgement_is_lost_says_so(proxy, both, durations):
    through, direct = both
    direct.apply_grad(np.full(4, 5.0))
    take = through.take(1)
    taken = take.__enter__()
    proxy.stall()
    with durations(call=0.4), pytest.raises(redisacc.OutcomeUnknownError) as failure:
        take.__exit__(None, None, None)
    proxy.resume()
    assert taken.gradient.tolist() == [5.0] * 4
    assert failure.value.settle() is None
    assert direct.info().unacknowledged == []


def test_a_round_that_is_recovered_before_settle_is_not_delivered(proxy, both, durations):
    """settle() cannot take the recovery for an earlier copy of its own request."""
    through, direct = both
    direct.apply_grad(np.full(4, 5.0))
    take = through.take(1)
    take.__enter__()
    proxy.stall()
    with durations(call=0.4), pytest.raises(redisacc.OutcomeUnknownError) as failure:
        take.__exit__(None, None, None)
    proxy.cut_all()
    proxy.resume()
    with direct.recover() as found:
        assert found.gradient.tolist() == [5.0] * 4
    with pytest.raises(redisacc.ConflictError, match=rf"recover\(\) gave it to '{re.escape(direct._worker)}'"):
        failure.value.settle()


def test_what_was_counted_counts_even_if_its_copy_is_refused(proxy, both, real_server):
    """The first copy is counted, its reply is lost, and then the server has no memory left for the second."""
    through, direct = both
    admin = real_server.client()
    proxy.arm(Fault("reply", 0, 0))
    proxy.when_it_happens = lambda: admin.config_set("maxmemory", 1)
    try:
        result = through.apply_grad(np.ones(4))
        assert proxy.happened()
    finally:
        admin.config_set("maxmemory", 0)
        proxy.when_it_happens = lambda: None
    assert (result.outcome, result.num_accumulated) == ("applied", 1)
    assert direct.num_accumulated() == 1


@pytest.mark.servers("valkey")
def test_a_refusal_that_can_not_be_resolved_is_unknown(proxy, both, real_client):
    """The first copy is counted, its reply is lost, and from then on the server refuses all scripts."""
    through, direct = both
    proxy.arm(Fault("reply", 0, 0))
    proxy.when_it_happens = lambda: real_client.acl_setuser("default", commands=["-eval", "-evalsha"])
    try:
        with pytest.raises(redisacc.OutcomeUnknownError) as failure:
            through.apply_grad(np.ones(4))
        assert proxy.happened()
    finally:
        real_client.acl_setuser("default", enabled=True, commands=["+eval", "+evalsha"])
    assert failure.value.settle()
    assert direct.num_accumulated() == 1
