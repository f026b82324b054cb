import torch
from torch import nn
from torch.utils.data import DataLoader

import redisacc.torch
from benchmarks.comparison.digits import BATCH, EPOCHS, digits, report

torch.manual_seed(0)
data = digits()
model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
optimizer = redisacc.torch.Optimizer(optimizer, "digits", model)
loader = DataLoader(data, BATCH, sampler=optimizer.sampler(data, BATCH))
for epoch in range(EPOCHS):
    for images, labels in loader:
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    report(epoch, model)
