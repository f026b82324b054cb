"""The GPT in float32, with an optimizer and a way of making the update that the environment names."""

import os

import redis
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import redisacc.torch
from benchmarks.comparison.gpt import BATCH, EPOCHS, GPT, report, text

torch.manual_seed(0)
data = text()
model = GPT()
inner = getattr(torch.optim, os.environ["COMPARISON_OPTIMIZER"])(model.parameters(), lr=1e-3)
optimizer = redisacc.torch.Optimizer(inner, "modes", model, fused=os.environ["COMPARISON_FUSED"] == "True")
loader = DataLoader(data, BATCH, sampler=optimizer.sampler(data, BATCH))
for epoch in range(EPOCHS):
    for tokens, following in loader:
        cross_entropy(model(tokens).transpose(1, 2), following).backward()
        optimizer.step()
        optimizer.zero_grad()
    report(epoch, model)
passed = redis.Redis.from_url(os.environ["REDISACC_URL"]).info("stats")
print(
    "bytes", (passed["total_net_input_bytes"] + passed["total_net_output_bytes"]) / optimizer.training_step, flush=True
)
print("steps", optimizer.training_step / EPOCHS, flush=True)
