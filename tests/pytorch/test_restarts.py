"""Processes that are killed and started again change no bit, although they have schedulers and samplers."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from networks import Net
from support.servers import Snapshot

PROGRAM = Path(__file__).with_name("program.py")
EPOCHS = 8
pytestmark = [pytest.mark.servers("valkey"), pytest.mark.timeout(300)]


def environment():
    return {**os.environ, "PYTHONPATH": ":".join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}


def run(url, workers, kills, **variables):
    """Runs the program in some processes, and kills one that has said some words. Returns what the last ones say.

    Args:
        kills: what it has said, and a step. "all": all of them at once, when one of them makes that step.
    """
    left, endings, codes, lock = list(kills), [], [], threading.Lock()
    every = {}

    def start(place):
        command = [sys.executable, PROGRAM, url, str(EPOCHS), str(workers)]
        environ = {**environment(), **variables}
        every[place] = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ)

    def follow(place):
        while True:
            process = every[place]
            for line in process.stdout:
                if not line.endswith("\n"):
                    # It was killed in the middle of it.
                    break
                what, step, *digest = line.split()
                if what == "ends":
                    endings.append((int(step), *digest))
                with lock:
                    due = [one for one in left if one[0] in (what, "all") and one[1] <= int(step)][:1]
                    for one in due:
                        left.remove(one)
                for one in every.values() if due and due[0][0] == "all" else [process] * len(due):
                    one.kill()
            process.stdout.close()
            if process.wait() != -signal.SIGKILL:
                codes.append(process.returncode)
                return
            start(place)

    for place in range(workers):
        start(place)
    threads = [threading.Thread(target=follow, args=[place]) for place in range(workers)]
    try:
        for one in threads:
            one.start()
        for one in threads:
            one.join(250)
    finally:
        for one in every.values():
            one.kill()
            one.wait()
    assert codes == [0] * workers
    assert left == []
    return endings


def test_kills_change_no_bit(real_server, real_client):
    undisturbed = run(real_server.url, 2, ())
    real_client.flushall()
    disturbed = run(real_server.url, 2, [("leads", 7), ("sends", 9), ("all", 12), ("sends", 17), ("leads", 23)])
    # 8 epochs of 50 examples, 10 in a step.
    assert {step for step, _ in undisturbed} == {40}
    assert undisturbed == [undisturbed[0]] * 2
    assert disturbed == undisturbed


@pytest.mark.timeout(600)
def test_kills_change_no_bit_if_each_process_makes_the_updates(real_server, real_client):
    undisturbed = run(real_server.url, 2, (), SNAPSHOT_EVERY="6")
    real_client.flushall()
    # Before a snapshot but the first, all processes, and in the middle of a backward pass.
    kills = [("leads", 4), ("all", 11), ("sends", 17)]
    disturbed = run(real_server.url, 2, kills, SNAPSHOT_EVERY="6")
    assert undisturbed == [(40, undisturbed[0][1])] * 2
    assert disturbed == undisturbed


def test_torchrun_starts_the_processes(real_server):
    """Its variables are all that they know of each other."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, PROGRAM, real_server.url, "1"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment(), timeout=150)
    endings = [line for line in done.stdout.splitlines() if line.startswith("ends")]
    # 50 examples, 10 in a step.
    assert len(endings) == 2
    assert endings[0] == endings[1]
    assert endings[0].startswith("ends 5 ")


@pytest.mark.forges
def test_worker_0_waits_for_weights_that_another_process_claims(real_client, wrap):
    """Else it would draw its first batch for step 0, and compute it with the weights of a later step."""
    real_client.hset("redisacc:{torch}:parameters:claims", "worker 1", f"7 {32 * '0'} 1 machine.1.1")
    assert wrap(Net()).training.latest()[0] == 0


def test_the_server_loses_all_when_a_process_has_just_joined(real_client, proxy, wrap, background, durations, caplog):
    """It must not take the lease, because the one that leads has the state of the optimizer."""

    def train(one, model):
        for _ in range(3):
            model(torch.ones(2, 4)).sum().backward()
            one.step()
            one.zero_grad()

    models = torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)
    running = [background(train, wrap(models[0], workers=2), models[0])]

    def lose():
        durations(young=20.0)
        real_client.flushall()

    # After the lease of its number, it asks for that of the chief.
    proxy.before("hold_lease", lambda: proxy.before("hold_lease", lose))
    running.append(background(train, wrap(models[1], workers=2, redis=proxy.url), models[1]))
    for one in running:
        one.result(60)
    assert "of a living worker" not in caplog.text


@pytest.mark.loses_data
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("is_older", [True, False], ids=["older", "empty"])
@pytest.mark.parametrize("is_published", [True, False], ids=["published", "not yet"])
def test_the_server_loses_buffers(real_client, wrap, background, clock, is_published, is_older, fused):
    """Those of worker 0, before or after it has published them, and before the other one has read them."""
    together = threading.Barrier(2, timeout=60)

    def train(number):
        model = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.BatchNorm1d(2))
        one = wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), workers=2, number=number, fused=fused)

        def step():
            model(torch.eye(4) + number).sum().backward()
            one.step()
            one.zero_grad()

        step()
        kept = Snapshot(real_client)
        together.wait()
        step()
        if number == 0:
            if is_published:
                one.sync_buffers()
            kept.restore() if is_older else real_client.flushall()
        together.wait()
        if number or not is_published:
            one.sync_buffers()
        buffers = [each.clone() for each in model.buffers()]
        # One that has seen older data before the leader restored what it has makes a step again.
        while one.training_step < 3:
            step()
        return buffers

    with clock.running():
        one, other = [each.result(60) for each in [background(train, number) for number in (0, 1)]]
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_an_outage_when_a_training_begins(proxy, wrap, background, durations, until, caplog):
    """Buffers are published under a name of their own, by a handle that is opened then."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.BatchNorm1d(2))
    one = wrap(model, redis=proxy.url)
    durations(opening=0.2, call=0.2, poll=0.2)

    def begin():
        proxy.refuses = True
        proxy.cut_all()

    # That of the buffers is the first.
    proxy.before("publish", begin)
    running = background(lambda: (model(torch.eye(4)).sum().backward(), one.step()))
    until(lambda: "to publish frozen parameters and buffers; trying until" in caplog.text or not running.running)
    proxy.refuses = False
    running.result(60)


@pytest.mark.slow
@pytest.mark.parametrize("fused", [True, False])
def test_an_outage_at_each_exchange_of_a_beginning(wrap, proxy, outages, durations, monkeypatch, fused):
    """A process that is started again has its run's patience from the first exchange on."""
    monkeypatch.setenv("REDISACC_RESTARTED", "1")
    model = torch.nn.Linear(4, 2)
    with wrap(model, fused=fused) as one:
        model(torch.eye(4)).sum().backward()
        one.step()
    durations(opening=0.2, call=0.2, poll=0.2)
    for after in itertools.count():
        outages.begin_after(after)
        with wrap(torch.nn.Linear(4, 2), redis=proxy.url, fused=fused) as one:
            assert one.training_step == 1
            is_over = outages.number == after
        if is_over:
            break
