"""Users whom the access control list refuses something: what they may do is done once, and errors name the cause."""

import numpy as np
import pytest

import redisacc

PASSWORD = "secret"
# Servers word it differently.
REFUSED = r"(a key|the keys).*`redisacc acl` prints rules that suffice"
LARGE = np.ones(300_000, np.float32)

pytestmark = [pytest.mark.servers("valkey", "redis7", "redis62", "cluster"), pytest.mark.every_server]


@pytest.fixture
def url_of_user(client, real_server):
    """Makes a user and returns the URL to connect as this user."""

    def make(**rights):
        client.acl_setuser(
            "limited", enabled=True, reset=True, reset_channels=True, passwords=[f"+{PASSWORD}"], **rights
        )
        return real_server.url.replace("://", f"://limited:{PASSWORD}@")

    yield make
    client.acl_deluser("limited")


def test_a_user_who_may_not_publish_changes_things_once(url_of_user, open_dense, open_parameters):
    """The scripts publish last, when everything is written. An error would look as if nothing was."""
    url = url_of_user(keys=["*"], commands=["+@all"])
    with redisacc.ConditionalAccumulator("float32", None, "w", redis=url, limits=redisacc.Limits(in_place=0)) as acc:
        assert acc.apply_grad(np.ones(3)).outcome == "applied"
        assert acc.apply_grad(np.ones(3)).num_accumulated == 2
        assert acc.take_grad(2, timeout=20).tolist() == [1, 1, 1]
        # This one announces itself before it is complete.
        assert acc.apply_grad(LARGE, local_step=1).num_accumulated == 1
        assert acc.info().applied == 3
        acc.delete()
    parameters = open_parameters("w", redis=url)
    parameters.publish([LARGE], 1)
    assert parameters.latest()[0] == 1


def test_a_script_that_the_server_lacks_is_not_the_cause_of_a_refused_key(url_of_user, client):
    url = url_of_user(keys=["redisacc:names", "redisacc:{mine*"], commands=["+@all"])
    client.script_flush()
    with pytest.raises(redisacc.ServerError, match=REFUSED) as failure:
        redisacc.ConditionalAccumulator("float32", [3], "w", redis=url)
    assert "acl --load" not in str(failure.value)


@pytest.mark.servers("cluster")
def test_a_user_without_rights_on_the_partitions(url_of_user, open_dense):
    """The parts of gradients have other names than the record, {w/p}."""
    url = url_of_user(keys=["redisacc:names", "redisacc:{w}*"], channels=["*"], commands=["+@all"])
    acc = open_dense("float32", LARGE.shape, "w", partitions=3)
    with redisacc.ConditionalAccumulator("float32", LARGE.shape, "w", redis=url) as limited:
        with pytest.raises(redisacc.ServerError, match=REFUSED):
            limited.apply_grad(LARGE)
        assert acc.num_accumulated() == 0
        acc.apply_grad(LARGE)
        with pytest.raises(redisacc.ServerError, match=REFUSED):
            limited.take_grad(1, timeout=20)
    # The round is not lost: someone with the rights recovers it.
    with acc.recover() as found:
        assert (found.gradient == LARGE).all()


@pytest.mark.servers("cluster")
def test_a_user_whom_only_some_nodes_know(url_of_user, client, real_server):
    url = url_of_user(keys=["*"], channels=["*"], commands=["+@all"])
    ignorant = client.get_primaries()[-1]
    client.get_redis_connection(ignorant).acl_deluser("limited")
    expected = rf"username-password.*\(node .*:{ignorant.port}; every node needs the same users and passwords\)"
    opened = []
    with pytest.raises(redisacc.ServerError, match=expected) as failure:
        opened += [redisacc.ConditionalAccumulator("float32", [3], name, redis=url) for name in "abcdefgh"]
    assert PASSWORD not in str(failure.value).replace("username-password", "")
    for acc in opened:
        acc.close()
