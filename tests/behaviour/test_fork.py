"""Forked children: clients of their own. Threads: one handle for all of them."""

import subprocess
import sys
import textwrap

import numpy as np
import pytest
from support.selection import ONE_NODE

import redisacc


def run(script, url):
    """Runs a program that may end as an interpreter does. It forks while other threads run, of which Python warns."""
    beginning = "import os, sys, warnings; warnings.simplefilter('ignore', DeprecationWarning); import redisacc\n"
    process = subprocess.run(
        [sys.executable, "-c", beginning + "url = sys.argv[1]\n" + textwrap.dedent(script), url],
        capture_output=True,
        text=True,
        timeout=40,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


@pytest.mark.every_server
@pytest.mark.servers("valkey", "redis62")
@pytest.mark.fixed("client")
def test_parent_and_children_share_a_handle_and_no_gradient_is_lost(open_dense, fork):
    acc = open_dense("float64", [1], "w", reduction_type="SUM")
    acc.apply_grad([1.0])

    def work():
        for _ in range(50):
            assert acc.apply_grad([1.0])
        yield None

    children = [fork(work) for _ in range(3)]
    next(work())
    for child in children:
        child.value()
    # Had a child used its parent's id, requests would have been refused or taken for copies.
    assert acc.info().duplicates == 0
    assert acc.take_grad(201, timeout=0).tolist() == [201.0]


@pytest.mark.slow
@pytest.mark.servers("valkey")
def test_a_childs_end_does_not_take_the_parents_private_accumulator_away(real_server, real_client):
    out = run(
        """
        acc = redisacc.ConditionalAccumulator("float32", [1], redis=url)
        acc.apply_grad([1.0])
        for ends in (lambda: acc.apply_grad([3.0]), acc.close):
            pid = os.fork()
            if pid == 0:
                ends()
                del acc
                sys.exit(0)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        print(acc.take_grad(2).tolist())
        """,
        real_server.url,
    )
    assert out == "[2.0]\n"
    assert real_client.keys() == []


@pytest.mark.slow
@pytest.mark.servers(*ONE_NODE)
def test_nothing_is_imported_later_because_a_fork_during_an_import_would_block_the_child(real_server):
    run(
        """
        import redis
        redis.Redis.from_url(url).ping()  # redis-py looks up its own version, once.
        redisacc.Sparse  # The first use of a name imports all that redisacc ever needs.
        imported = set(sys.modules)
        dense = redisacc.ConditionalAccumulator("float32", [70_000], "imports", redis=url)
        sparse = redisacc.SparseConditionalAccumulator("float32", [None, 1], "rows", redis=url)
        dense.apply_grad([1.0] * 70_000)
        sparse.apply_grad([2, 1, 2], [[1.0], [2.0], [3.0]])
        spec = {"a": ("float32", (70_000,)), "b": redisacc.Sparse("int8", (9,))}
        tree = redisacc.TreeAccumulator(spec, "t", redis=url)
        tree.apply_grad({"a": [1.0] * 70_000, "b": None})
        with dense.take(1), sparse.take(1), tree.take(1):
            pass
        assert set(sys.modules) == imported, set(sys.modules) - imported
        dense.delete()
        sparse.delete()
        tree.delete()
        """,
        real_server.url,
    )


@pytest.mark.slow
@pytest.mark.servers(*ONE_NODE)
def test_an_upload_belongs_to_the_process_that_began_it(real_server, real_client, fork):
    leaf = np.ones(200_000, np.float32)
    with (
        redisacc.Chief("train", {"w": leaf, "x": leaf}, workers=1, redis=real_client) as chief,
        redisacc.Worker("train", number=0, redis=real_server.url) as worker,
    ):
        next(worker.steps())
        upload = worker.begin()
        upload.put("w", leaf)

        def work():
            for call in (lambda: upload.put("x", leaf), upload.commit):
                with pytest.raises(redisacc.InvalidArgumentError, match="from which this one was forked"):
                    call()
            upload.abandon()
            yield None

        fork(work).value()
        upload.put("x", leaf)
        assert upload.commit().outcome == "applied"
        chief.delete()
