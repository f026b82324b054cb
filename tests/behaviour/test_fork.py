"""Forked children: clients of their own. Threads: one handle for all of them."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
from support.selection import ONE_NODE

# These tests fork while other threads run, of which Python 3.12 and later warn.
PREAMBLE = """
import os, sys, threading, warnings
warnings.simplefilter("ignore", DeprecationWarning)
import redisacc
from redisacc._clock import durations
# A busy machine may pause a process for longer than a lease, and another taker would get its round.
durations.taker_lease = 60.0
url = sys.argv[1]

def child(function):
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            function()
            status = 0
        except BaseException:
            import traceback
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    return pid

def join(*pids):
    for pid in pids:
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
"""


def run(script, url):
    process = subprocess.run(
        [sys.executable, "-c", PREAMBLE + textwrap.dedent(script), url],
        capture_output=True,
        text=True,
        timeout=40,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


@pytest.mark.every_server
@pytest.mark.servers("valkey", "redis62")
def test_parent_and_children_share_a_handle_and_no_gradient_is_lost(real_server, real_client):
    run(
        """
        for limit in (0, 10**9):
            acc = redisacc.ConditionalAccumulator(
                "float64", [1], "w", reduction_type="SUM", redis=url, limits=redisacc.Limits(in_place=limit)
            )
            acc.apply_grad([1.0])
            def work():
                for _ in range(50):
                    assert acc.apply_grad([1.0])
            pids = [child(work) for _ in range(3)]
            work()
            join(*pids)
            # Had a child used its parent's id, requests would have been refused or taken for copies.
            assert acc.info().duplicates == 0
            assert acc.num_accumulated() == 201
            assert acc.take_grad(201).tolist() == [201.0]
            acc.delete()
        spec = {"d": ("float64", (1,)), "s": redisacc.Sparse("int64", (None,))}
        tree = redisacc.TreeAccumulator(spec, "t", reduction_type="SUM", redis=url)
        def work():
            for _ in range(10):
                assert tree.apply_grad({"d": [1.0], "s": ([os.getpid()], [1])})
        work()
        pids = [child(work) for _ in range(2)]
        join(*pids)
        total = tree.take_grad(30)
        assert total["d"].tolist() == [30.0]
        assert total["s"].indices.tolist() == sorted([os.getpid(), *pids])
        assert total["s"].values.tolist() == [10] * 3
        tree.delete()
        """,
        real_server.url,
    )
    assert real_client.keys() == []


@pytest.mark.slow
@pytest.mark.servers("valkey")
def test_a_child_of_a_process_that_waits_may_wait_itself(real_server, real_client):
    run(
        """
        acc = redisacc.ConditionalAccumulator("float32", [1], "w", redis=url)
        other = redisacc.ConditionalAccumulator("float32", [1], "w", redis=url)
        got = []
        thread = threading.Thread(target=lambda: got.append(acc.take_grad(1)))
        thread.start()
        while len(other.info().waiting) < 1:
            pass
        def work():
            assert acc.take_grad(1, timeout=20).tolist() == [2.0]
        pid = child(work)
        while len(other.info().waiting) < 2:
            pass
        other.apply_grad([1.0])
        thread.join()
        assert got[0].tolist() == [1.0]
        other.apply_grad([2.0], local_step=1)
        join(pid)
        acc.delete()
        """,
        real_server.url,
    )
    assert real_client.keys() == []


@pytest.mark.slow
@pytest.mark.servers("valkey")
def test_a_childs_end_does_not_take_the_parents_private_accumulator_away(real_server, real_client):
    out = run(
        """
        acc = redisacc.ConditionalAccumulator("float32", [1], redis=url)
        acc.apply_grad([1.0])
        pid = os.fork()
        if pid == 0:
            acc.apply_grad([3.0])
            del acc
            sys.exit(0)
        join(pid)
        pid = os.fork()
        if pid == 0:
            with acc:
                pass
            sys.exit(0)
        join(pid)
        print(acc.take_grad(2).tolist())
        """,
        real_server.url,
    )
    assert out == "[2.0]\n"
    assert real_client.keys() == []


@pytest.mark.slow
@pytest.mark.servers("valkey")
def test_a_private_accumulator_of_a_child_is_its_own(real_server, real_client):
    run(
        """
        acc = redisacc.ConditionalAccumulator("float32", [1], redis=url)
        def work():
            mine = redisacc.ConditionalAccumulator("float32", [1], redis=url)
            assert mine.accumulator_ref != acc.accumulator_ref
            mine.apply_grad([1.0])
            assert mine.take_grad(1).tolist() == [1.0]
            mine.close()
        join(child(work), child(work))
        assert acc.num_accumulated() == 0
        """,
        real_server.url,
    )
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


def test_threads_share_a_handle(open_sparse_stored, background):
    acc = open_sparse_stored("float64", [8, 1], reduction_type="SUM")
    threads, each = 8, 20

    def work(number):
        for _ in range(each):
            assert acc.apply_grad([number], [[1.0]])
            acc.num_accumulated()
        acc.peek()

    for job in [background(work, number) for number in range(threads)]:
        job.result()
    assert acc.num_accumulated() == threads * each
    assert acc.info().duplicates == 0
    indices, values, _ = acc.take_grad(threads * each)
    assert indices.tolist() == list(range(threads))
    assert set(values.ravel().tolist()) == {float(each)}


@pytest.mark.slow
@pytest.mark.servers(*ONE_NODE)
def test_an_upload_belongs_to_the_process_that_began_it(real_server):
    run(
        """
        import numpy as np

        leaf = np.ones(200_000, np.float32)
        chief = redisacc.Chief("train", {"w": leaf, "x": leaf}, workers=1, redis=url)
        worker = redisacc.Worker("train", number=0, redis=url)
        next(worker.steps())
        upload = worker.begin()
        upload.put("w", leaf)

        def use():
            for call in (lambda: upload.put("x", leaf), upload.commit):
                try:
                    call()
                except redisacc.InvalidArgumentError as error:
                    assert "from which this one was forked: begin another one" in str(error)
                else:
                    raise AssertionError(call)
            upload.abandon()

        join(child(use))
        upload.put("x", leaf)
        assert upload.commit().outcome == "applied"
        chief.delete()
        """,
        real_server.url,
    )
