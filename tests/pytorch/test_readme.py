"""The lines of the README that train a model of PyTorch, run as they are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import redisacc
import redisacc.torch

README = Path(__file__).parents[2] / "README.md"


@pytest.mark.servers("valkey")
def test_the_lines_of_the_readme_train_a_model(real_client, real_server, monkeypatch):
    monkeypatch.setenv("REDISACC_URL", real_server.url)
    [code] = re.findall(r"^```python\n(optimizer = .*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)
    random = torch.Generator().manual_seed(0)
    x = torch.randn(256, 4, generator=random)
    model = nn.Linear(4, 2)
    names = {
        "DataLoader": DataLoader,
        "cross_entropy": cross_entropy,
        "data": TensorDataset(x, (x.sum(dim=1) > 0).long()),
        "model": model,
        "redisacc": redisacc,
        "torch": torch,
    }
    before = model.weight.detach().clone()
    # One process instead of four.
    exec(code.replace("workers=4", "workers=1"), names)
    optimizer = names["optimizer"]
    # An epoch.
    assert optimizer.training_step == 4
    assert not torch.equal(before, model.weight)
    optimizer.training.delete()
    optimizer.close()
