"""Trains a small network in several processes, with the loop of Hugging Face's accelerate.

pip install 'redisacc[server,torch]' accelerate
redisacc run --server --workers 2 -- python accelerate_loop.py
"""

import hashlib

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import redisacc.torch

NAME, EPOCHS, BATCH = "accelerate", 6, 8


def examples():
    x = torch.randn(160, 8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x[:, :3].argmax(dim=1))


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 3))


def rate(step):
    return 0.97**step


def main():
    accelerator = Accelerator()
    model, data = build(), examples()
    inner = torch.optim.AdamW(model.parameters(), lr=0.02)
    # clip_norm takes the place of accelerator.clip_grad_norm_.
    optimizer = redisacc.torch.Optimizer(inner, NAME, model, clip_norm=1.0)
    scheduler = optimizer.resume(torch.optim.lr_scheduler.LambdaLR(optimizer, rate))
    loader = DataLoader(data, BATCH, sampler=optimizer.sampler(data, BATCH))
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    for _ in range(EPOCHS):
        for x, y in loader:
            loss = cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    weights = b"".join(each.detach().cpu().numpy().tobytes() for each in model.parameters())
    print(f"weights {hashlib.sha256(weights).hexdigest()[:12]}, loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
