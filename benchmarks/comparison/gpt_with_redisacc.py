import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import redisacc.torch
from benchmarks.comparison.gpt import BATCH, EPOCHS, GPT, optimizer_of, precision, report, schedule, text

torch.manual_seed(0)
data = text()
model = GPT()
optimizer = optimizer_of(model)
optimizer = redisacc.torch.Optimizer(optimizer, "gpt", model, clip_norm=1.0)
loader = DataLoader(data, BATCH, sampler=optimizer.sampler(data, BATCH))
scheduler = optimizer.resume(schedule(optimizer))
for epoch in range(EPOCHS):
    for tokens, following in loader:
        with precision():
            loss = cross_entropy(model(tokens).transpose(1, 2), following)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    report(epoch, model)
