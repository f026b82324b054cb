"""Trains a PyTorch model with an embedding table, whose gradients are sparse, in several processes.

    pip install 'redisacc[server,torch]'
    redisacc run --server --workers 3 -- python torch_embeddings.py

At the end the first worker trains once more, in its process alone, and compares the parameters.
"""

import torch
from torch import nn

import redisacc.torch

NAME, STEPS, WORDS, DIM, LENGTH, BATCH = "torch-embeddings", 300, 500, 16, 11, 16


class Model(nn.Module):
    """Decides from the sum of its words' vectors whether a text is cheerful."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS, DIM, sparse=True)
        nn.init.normal_(self.words.weight, std=0.1)
        self.rest = nn.Sequential(nn.Linear(DIM, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, texts):
        return self.rest(self.words(texts).sum(dim=1)).squeeze(1)


def batch(step, number):
    """Returns the share of worker `number` of a step's data: also after a restart the same.

    Words with even numbers are cheerful, and so is a text with more of them than of others.
    """
    random = torch.Generator().manual_seed(step * 1000 + number)
    texts = torch.randint(WORDS, (BATCH, LENGTH), generator=random)
    return texts, ((texts % 2 == 0).sum(dim=1) > LENGTH / 2).float()


def backward(model, texts, cheerful):
    """Computes the gradients of all parameters; returns the loss."""
    model.zero_grad()
    loss = nn.functional.binary_cross_entropy_with_logits(model(texts), cheerful)
    loss.backward()
    return loss.item()


def adagrad(model):
    return torch.optim.Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.01)


def train():
    """Trains with the other processes; returns the model, the number of this one, and how many there are."""
    model = Model()
    optimizer = redisacc.torch.Optimizer(adagrad(model), NAME, model, until=STEPS)
    while not optimizer.finished:
        backward(model, *batch(optimizer.training_step, optimizer.training.number))
        optimizer.step()
    return model, optimizer.training.number, optimizer.training.workers


def train_alone(workers):
    """Trains in one process, on the shares of all workers at once; returns the model and the losses."""
    model = Model()
    optimizer = adagrad(model)
    losses = []
    for step in range(STEPS):
        shares = [batch(step, number) for number in range(workers)]
        losses.append(backward(model, *map(torch.cat, zip(*shares, strict=True))))
        optimizer.step()
    return model, losses


def main():
    torch.set_num_threads(1)
    together, number, workers = train()
    if number:
        return
    alone, losses = train_alone(workers)
    texts, cheerful = (torch.cat(parts) for parts in zip(*(batch(10**6, index) for index in range(32)), strict=True))
    with torch.no_grad():
        accuracy = ((together(texts) > 0) == (cheerful > 0)).float().mean().item()
        pairs = zip(together.parameters(), alone.parameters(), strict=True)
        difference = max((a - b).abs().max().item() for a, b in pairs)
    print(f"loss of one process: from {losses[0]:.3f} to {losses[-1]:.3f}; accuracy {accuracy:.3f}")
    print(f"largest difference of a parameter from one process: {difference:.1e}")
    # float32 rounds differently if the same numbers are added in another order.
    if not difference < 1e-3:
        raise SystemExit("the difference is larger than rounding explains")


if __name__ == "__main__":
    main()
