"""A handle that is pickled or copied opens the same accumulator by its name, or says why it cannot."""

import copy
import pickle

import numpy as np
import pytest
from support.servers import contents

import redisacc

pytestmark = pytest.mark.servers("valkey")


@pytest.fixture
def url(real_server):
    return real_server.url


@pytest.fixture
def handle(url, client):
    with redisacc.ConditionalAccumulator("float32", [2], "pickled", redis=url) as handle:
        yield handle
        if client.exists(handle.accumulator_ref):
            redisacc.ConditionalAccumulator("float32", [2], "pickled", redis=url).delete()


WAYS = {
    "pickle": lambda handle: pickle.loads(pickle.dumps(handle)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_is_a_handle_on_the_same_accumulator(handle, way):
    handle.apply_grad([1, 2])
    with WAYS[way](handle) as again:
        assert type(again) is type(handle)
        assert repr(again) == repr(handle)
        again.apply_grad([3, 4])
        assert handle.take_grad(2).tolist() == [2, 3]
        assert again.info() == handle.info()
    # Closing the copy does not close the first one.
    handle.apply_grad([1, 2], 1)


def test_a_sparse_one_keeps_everything_that_it_was_opened_with(url, monkeypatch):
    monkeypatch.setenv("REDISACC_URL", url)
    acc = redisacc.SparseConditionalAccumulator(
        "bfloat16",
        [None, 3],
        "pickled",
        "label",
        "SUM",
        worker="ann",
        limits=redisacc.Limits(in_place=7, buffer=1_000_000),
    )
    again = pickle.loads(pickle.dumps(acc))
    for one in (acc, again):
        assert (one.dtype, one.shape, one.name, one.reduction_type) == (acc.dtype, (None, 3), "label", "SUM")
        # The second has more elements than are added in place, as each row counts for 24 more.
        one.apply_grad([1], [[1, 1, 1]], local_step=one.global_step())
        assert (one.info().workers, one.info().buffered) == ({"ann": 1}, 1)
        one.take_grad(1)
        assert one.info().buffer_limit == 1_000_000
    # It was opened by the environment, which may name another address there.
    assert url.encode() not in pickle.dumps(acc)
    monkeypatch.setenv("REDISACC_URL", url.replace("/0", "/1"))
    with pytest.raises(redisacc.NotFoundError, match="accumulator"):
        pickle.loads(pickle.dumps(acc))


@pytest.mark.parametrize("created_again", [None, "float32", "float64"])
def test_a_pickle_creates_no_accumulator(handle, url, client, created_again):
    pickled = pickle.dumps(handle)
    handle.delete()
    if created_again:
        other = redisacc.ConditionalAccumulator(created_again, [2], "pickled", redis=url)
    before = contents(client)
    said = r"since this handle was pickled\. Open it by name" if created_again == "float32" else None
    with pytest.raises(redisacc.NotFoundError, match=said):
        pickle.loads(pickled)
    assert contents(client) == before
    if created_again:
        other.delete()


def test_a_pickle_finishes_no_creation_in_the_middle_of_a_deletion(handle, client):
    pickled = pickle.dumps(handle)
    client.hset(handle.accumulator_ref, "incarnation", f"deleted:{handle.info().incarnation}")
    with pytest.raises(redisacc.NotFoundError, match="accumulator"):
        pickle.loads(pickled)
    assert contents(client) == {}


@pytest.mark.parametrize("way", WAYS)
def test_what_cannot_be_pickled_says_why(url, client, way):
    private = redisacc.ConditionalAccumulator("float32", [2], redis=url)
    with pytest.raises(
        TypeError,
        match=r"cannot be pickled or copied: its accumulator is private .*\. Give the accumulator a shared_name",
    ):
        WAYS[way](private)
    private.close()
    held = redisacc.ConditionalAccumulator("float32", [2], "held", redis=client)
    with pytest.raises(
        TypeError, match=r"opened with a client, Redis, .*\. Open it with a URL or redis=None, or open 'held' by name"
    ):
        WAYS[way](held)
    held.close()
    with pytest.raises(redisacc.CancelledError, match="closed"):
        WAYS[way](held)
    redisacc.ConditionalAccumulator("float32", [2], "held", redis=client).delete()


def test_a_password_does_not_get_into_a_pickle(url, client):
    client.config_set("requirepass", "s3cret")
    try:
        secret = url.replace("redis://", "redis://default:s3cret@")
        with redisacc.ConditionalAccumulator("float32", [2], "pickled", redis=secret) as handle:
            with pytest.raises(
                TypeError,
                match=r"its URL holds a password, .*\. Put the URL into REDISACC_URL in every process and open it",
            ) as caught:
                pickle.dumps(handle)
            assert "s3cret" not in str(caught.value)
            handle.delete()
    finally:
        client.config_set("requirepass", "")


def test_a_copy_is_a_handle_on_the_same_parameters(real_server, real_client):
    handle = redisacc.Parameters("w", redis=real_server.url, name="label", publisher="ann")
    empty = pickle.loads(pickle.dumps(handle))
    assert empty.latest() is None
    handle.publish(np.ones(3), 0)
    again = pickle.loads(pickle.dumps(handle))
    assert (repr(again), again.name) == (repr(handle), "label")
    again.publish(np.zeros(3), 1)
    assert real_client.hget("redisacc:{w}:parameters", "publisher") == b"ann"
    assert handle.latest()[0] == 1
    held = pickle.dumps(handle)
    handle.delete()
    empty.publish(np.ones(3), 5)
    with pytest.raises(redisacc.NotFoundError, match="parameters"):
        pickle.loads(held)
