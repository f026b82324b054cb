"""Runs the examples with accelerate, Lightning and transformers, and kills a process of each.

Both processes end with the same weights: those that one process makes of the mean gradient, bit for bit.
"""

import dataclasses
import hashlib
import importlib
import re
import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from running import EXAMPLES, Programs, kill_one_of, output_of, until_step
from support.local_updates import LocalTraining
from torch.nn.functional import cross_entropy
from torch.utils.data import default_collate

import redisacc
from redisacc.data import Batches
from redisacc.embedded import Server

Loss = Callable[[Any], torch.Tensor]


def accelerate_loop(program):
    model, data = program.build(), program.examples()
    return model, data, lambda batch: cross_entropy(model(batch[0]), batch[1]), program.EPOCHS * len(data) // 16


def lightning_classifier(program):
    model = program.Classifier()
    return model, model.data, model.training_step, program.EPOCHS * len(model.data) // 16


def huggingface_trainer(program):
    model = program.build()

    def loss(batch):
        # The Trainer divides by the number of all labels that have a word before them.
        return model(**batch, num_items_in_batch=batch["labels"][..., 1:].numel()).loss

    return model, program.examples(), loss, program.STEPS


def rates(program):
    if hasattr(program, "rate"):
        return lambda step: 0.02 * program.rate(step)
    # Up in a line, and down in another one.
    up, end = program.WARMUP, program.STEPS
    return lambda step: 0.01 * (step / up if step < up else (end - step) / (end - up))


def expected(program, make, workers):
    """Returns the digest of the weights that one process makes of the mean gradient with redisacc.optim."""
    model, data, loss, steps = make(program)
    parameters = dict(model.named_parameters())
    # The Trainer's default.
    decay = 0.0 if make is huggingface_trainer else 0.01
    optimizer = dataclasses.replace(redisacc.optim.AdamW(0.0, weight_decay=decay, clip_norm=1.0), lr=rates(program))
    batches = Batches(len(data), program.BATCH * workers, seed=0)

    def gradient(number, step, values):
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(torch.from_numpy(np.array(values[name])))
        model.zero_grad()
        indices = batches.indices(step, number, workers).tolist()
        loss(default_collate([data[index] for index in indices])).backward()
        return {name: parameter.grad.numpy().copy() for name, parameter in parameters.items()}

    begin = {name: parameter.detach().numpy().copy() for name, parameter in parameters.items()}
    local = LocalTraining(optimizer, begin, weights=(1.0,) * workers, gradient=gradient).train(steps)
    weights = b"".join(local.parameters[name].tobytes() for name in parameters)
    return hashlib.sha256(weights).hexdigest()[:12]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("make", [accelerate_loop, lightning_classifier, huggingface_trainer])
def test_a_framework_trains_with_the_mean_gradient(make, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        # Of the frameworks, about each other.
        warnings.simplefilter("ignore")
        program = importlib.import_module(make.__name__)
        digest = expected(program, make, 2)
    command = ["run", "--workers", "2", "--", sys.executable]
    with Server() as server, Programs(server.url) as programs:
        run = programs.start("-m", "redisacc", *command, f"{make.__name__}.py")
        if sys.platform == "linux":
            until_step(5, program.NAME, server.url, run)
            kill_one_of(run, "worker")
        printed = output_of(run, 200)
    assert re.findall(r"weights (\w+)", printed) == [digest] * 2
    # Gradients left during the backward pass until the end.
    assert "From now on" not in printed
    if sys.platform == "linux":
        assert printed.count("was killed by SIGKILL; it restarts") == 1


def test_a_stream_and_an_unknown_number_of_processes_are_refused(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    program = importlib.import_module("huggingface_trainer")
    arguments = program.TrainingArguments(str(tmp_path), max_steps=2, report_to="none")
    trainer = program.Trainer(program.build(), arguments, train_dataset=program.examples())
    with pytest.raises(redisacc.InvalidArgumentError, match="start them with `redisacc run --workers N`, or pass work"):
        program.join(trainer, "refused")
    trainer.train_dataset = iter([])
    with pytest.raises(redisacc.InvalidArgumentError, match="let each process read its own part of a stream, and pass"):
        program.join(trainer, "refused", workers=2)
