"""Checkpoints of a training whose processes make the steps: they hold snapshots."""

from __future__ import annotations

import subprocess
import sys
from functools import partial

import pytest
import torch
from networks import Net, batch
from test_restarts import environment
from torch import nn
from torch.nn.functional import cross_entropy

import redisacc
import redisacc.torch

pytestmark = [pytest.mark.servers("valkey"), pytest.mark.timeout(100)]


class Normed(nn.Sequential):
    """Has buffers, which a checkpoint holds as well."""

    def __init__(self):
        super().__init__(Net(), nn.BatchNorm1d(3))


@pytest.fixture
def train(wrap):
    return partial(trained, wrap)


def trained(wrap, until, number=None, **options):
    """Makes steps with an optimizer whose state counts, and a rate that changes."""
    model = Normed()
    inner = torch.optim.NAdam([{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": 0.1}])
    with wrap(model, inner, until=until, number=number, **options) as optimizer:
        began = optimizer.training_step
        scheduler = optimizer.resume(torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50))
        while not optimizer.finished:
            x, y = batch(optimizer.training_step, optimizer.training.number)
            cross_entropy(model(x), y).backward()
            assert (optimizer.training.kept() or 0) == optimizer.training_step
            optimizer.training.keep(optimizer.training_step + 1)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    return began, model


def check_equal(model, expected):
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), expected.parameters(), strict=True))


def test_everything_is_lost_and_the_training_continues_with_the_same_bits(train, real_client, background, tmp_path):
    expected = train(9, name="expected")[1]
    options = {"checkpoint": redisacc.Checkpoints(tmp_path, every=2, keep=9)}
    assert train(5, **options)[0] == 0
    steps = [int(each.stem.removeprefix("step-")) for each in sorted(tmp_path.glob("step-*"))]
    # A snapshot that is on its way when the next one is due is the later one.
    assert (steps[-1], 0 < steps[0] <= 5) == (5, True)
    real_client.flushall()
    began, model = train(9, **options)
    assert began == 5
    check_equal(model, expected)
    # Also from an earlier one, and with data of the server that is even older.
    for each in tmp_path.glob("step-0000000[6-9]*"):
        each.unlink()
    real_client.flushall()
    assert train(3)[0] == 0
    began, model = train(9, **options)
    assert began == 5
    check_equal(model, expected)


def test_several_processes_begin_with_what_worker_0_has(train, real_client, background, tmp_path):
    options = {"workers": 2, "checkpoint": tmp_path}
    running = [background(train, 4, number, **options) for number in range(2)]
    assert [one.result(50)[0] for one in running] == [0, 0]
    real_client.flushall()
    running = [background(train, 7, number, **options) for number in range(2)]
    (_, first), (_, second) = [one.result(50) for one in running]
    check_equal(second, first)
    running = [background(train, 7, number, workers=2, name="expected") for number in range(2)]
    check_equal(first, running[0].result(50)[1])


def test_checkpoint_and_restore(train, real_client, real_server, tmp_path):
    def command(*arguments):
        line = [sys.executable, "-m", "redisacc", *arguments, "--redis", real_server.url]
        return subprocess.run(line, check=False, capture_output=True, text=True, env=environment())

    file = str(tmp_path / "saved.safetensors")
    _, expected = train(5)
    assert command("checkpoint", "torch", file).returncode == 0
    done = command("restore", "torch", file)
    assert (done.returncode, "step 5 is published. To go back, give --force" in " ".join(done.stderr.split())) == (
        1,
        True,
    )
    assert train(8)[0] == 5
    assert command("restore", "torch", file, "--force").returncode == 0
    began, model = train(5)
    assert began == 5
    check_equal(model, expected)
    real_client.flushall()
    assert command("restore", "torch", file).returncode == 0
    began, model = train(8)
    assert began == 5
    check_equal(model, train(8, name="expected")[1])


def test_other_checkpoints_are_refused_by_name(wrap, real_client, tmp_path):
    def make(folder, *, fused, model=Net):
        of = model()
        with wrap(of, until=2, fused=fused, checkpoint=tmp_path / folder) as optimizer:
            while not optimizer.finished:
                sum(each.sum() for each in of.parameters()).backward()
                optimizer.step()
        real_client.flushall()

    make("mean", fused=False)
    make("fused", fused=True)
    with pytest.raises(redisacc.InvalidArgumentError, match="written with fused=True: give that, or a new folder"):
        make("fused", fused=False)
    with pytest.raises(redisacc.InvalidArgumentError, match="only the model has the parameter '0"):
        make("mean", fused=False, model=Normed)
