import torch
from torch import distributed
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from benchmarks.comparison.gpt import BATCH, EPOCHS, GPT, optimizer_of, precision, report, schedule, text

distributed.init_process_group("gloo")
torch.manual_seed(0)
data = text()
model = DistributedDataParallel(GPT())
optimizer = optimizer_of(model)
sampler = DistributedSampler(data)
loader = DataLoader(data, BATCH, sampler=sampler)
scheduler = schedule(optimizer)
for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    for tokens, following in loader:
        with precision():
            loss = cross_entropy(model(tokens).transpose(1, 2), following)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    report(epoch, model)
distributed.destroy_process_group()
