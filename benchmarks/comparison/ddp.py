import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from benchmarks.comparison.digits import BATCH, EPOCHS, digits, report

distributed.init_process_group("gloo")
torch.manual_seed(0)
data = digits()
model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
sampler = DistributedSampler(data)
loader = DataLoader(data, BATCH, sampler=sampler)
for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    for images, labels in loader:
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    report(epoch, model)
distributed.destroy_process_group()
