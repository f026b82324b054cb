"""Models that the tests train, and their data."""

from __future__ import annotations

import torch
from torch import nn


class Net(nn.Module):
    """A table whose gradients are sparse if wanted, a layer that is used twice, and one that is not used."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 8, sparse=sparse)
        self.inner = nn.Linear(8, 8)
        self.also_inner = self.inner
        self.unused = nn.Linear(2, 2)
        self.out = nn.Linear(8, 3)
        # Not that of torch, which all threads share.
        random = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.3, generator=random)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.inner(self.words(words).sum(dim=1)))
        return self.out(torch.relu(self.also_inner(x)))


def batch(step: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(100 * step + number)
    return torch.randint(20, (5, 4), generator=random), torch.randint(3, (5,), generator=random)


def weights_of(model):
    return {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}


class Large(nn.Module):
    """Gradients that are cut into parts: 2 MB."""

    def __init__(self) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(360, 360, bias=False) for _ in range(4)])
        for layer in self.layers:
            nn.init.normal_(layer.weight, std=0.05, generator=random)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def loss_of(model, step=0):
    return model(torch.rand(8, 360, generator=torch.Generator().manual_seed(step))).square().mean() * 100
