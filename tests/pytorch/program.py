"""A program that every process of a training runs: run by test_restarts.py.

python program.py URL EPOCHS [WORKERS]. Without WORKERS, the environment says how many there are. Says where it is in
each step, and in the end the digest of the weights. SNAPSHOT_EVERY in the environment: each process makes the updates.
"""

import hashlib
import os
import sys

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import redisacc.torch
from redisacc.torch import _upload

_, url, epochs, *workers = sys.argv


def say(*words):
    # In one write: torchrun gives all processes one pipe, and an unbuffered print() writes each word by itself.
    os.write(1, f"{' '.join(map(str, words))}\n".encode())


torch.set_num_threads(1)
torch.manual_seed(0)
data = TensorDataset(torch.randn(50, 4), torch.randint(3, (50,)))
# Gradients of more than 512 KiB leave during the backward pass, however short it is.
_upload.SHORT_PASS = 0.0
model = nn.Sequential(nn.Linear(4, 360), nn.ReLU(), nn.Linear(360, 360), nn.ReLU(), nn.Linear(360, 3))

inner = torch.optim.AdamW(model.parameters(), lr=0.01)
how = {"workers": int(workers[0])} if workers else {}
if every := os.environ.get("SNAPSHOT_EVERY"):
    inner = torch.optim.NAdam([{"params": model[:1].parameters()}, {"params": model[1:].parameters(), "lr": 0.02}])
    how |= {"fused": False, "snapshot_every": int(every)}
optimizer = redisacc.torch.Optimizer(inner, "torch", model, clip_norm=1.0, redis=url, **how)
# An upload has begun by then.
model[2].register_full_backward_hook(lambda *_: say("sends", optimizer.training_step))
scheduler = optimizer.resume(
    torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=200, cycle_momentum=False)
)
loader = DataLoader(data, 5, sampler=optimizer.sampler(data, 5))
for _ in range(int(epochs)):
    for x, y in loader:
        # Whatever was killed, it is of the step of the weights.
        kept = optimizer.training.kept() or {"step": 0}
        assert kept["step"] == optimizer.training_step
        optimizer.training.keep({"step": kept["step"] + 1})
        cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        say("leads" if optimizer.training.leads else "works", optimizer.training_step)
assert optimizer.training.kept() == {"step": optimizer.training_step}
weights = b"".join(each.detach().numpy().tobytes() for each in model.parameters())
say("ends", optimizer.training_step, hashlib.sha256(weights).hexdigest())
