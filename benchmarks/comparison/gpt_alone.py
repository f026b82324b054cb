import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from benchmarks.comparison.gpt import BATCH, EPOCHS, GPT, optimizer_of, precision, report, schedule, text

torch.manual_seed(0)
data = text()
model = GPT()
optimizer = optimizer_of(model)
loader = DataLoader(data, BATCH, shuffle=True)
scheduler = schedule(optimizer)
for epoch in range(EPOCHS):
    for tokens, following in loader:
        with precision():
            loss = cross_entropy(model(tokens).transpose(1, 2), following)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    report(epoch, model)
