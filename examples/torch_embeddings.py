"""Trains a PyTorch model with an embedding table, whose gradients are sparse, in several processes.

    pip install redisacc torch
    python torch_embeddings.py --redis redis://localhost:6379/0 --workers 3

Each worker computes gradients for its part of the batch. The rows of the table that it touched go through a sparse
accumulator, and all other gradients through a dense one. At the end the program trains once more, in one process, and
compares the parameters.
"""

import argparse
import os

import numpy as np
import redis
import torch
from torch import multiprocessing, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import redisacc

WORDS, DIM, LENGTH, BATCH, RATE = 500, 16, 11, 16, 0.5


class Model(nn.Module):
    """Decides from the sum of its words' vectors whether a text is cheerful."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS, DIM, sparse=True)
        nn.init.normal_(self.words.weight, std=0.1)
        self.rest = nn.Sequential(nn.Linear(DIM, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, texts):
        return self.rest(self.words(texts).sum(dim=1)).squeeze(1)


def batch(step, index):
    """Returns the data of worker `index` for that step, also after a restart. Words with even numbers are cheerful."""
    random = torch.Generator().manual_seed(step * 1000 + index)
    texts = torch.randint(WORDS, (BATCH, LENGTH), generator=random)
    return texts, ((texts % 2 == 0).sum(dim=1) > LENGTH / 2).float()


def backward(model, texts, cheerful):
    """Computes the gradients of all parameters; returns the loss."""
    model.zero_grad()
    loss = nn.functional.binary_cross_entropy_with_logits(model(texts), cheerful)
    loss.backward()
    return loss.item()


def accumulators(client, name, worker):
    """Opens both accumulators. The table's sums: a row's "MEAN" is over only those workers that had the word."""
    shared = {"redis": client, "worker": worker, "once_per_worker": True}
    table = redisacc.SparseConditionalAccumulator(
        np.float32, [WORDS, DIM], f"{name}/words", reduction_type="SUM", **shared
    )
    return table, redisacc.ConditionalAccumulator(np.float32, [None], f"{name}/rest", **shared)


def work(url, name, index, steps):
    """Runs a worker. It reads the weights of each step from a stream, also after it was started again."""
    torch.set_num_threads(1)
    client = redis.Redis.from_url(url)
    table, rest = accumulators(client, name, f"worker-{index}")
    model = Model()
    seen, step = "0", -1
    while step < steps - 1:
        while not client.xread({f"{name}:weights": seen}, block=1000):
            pass
        [(seen, fields)] = client.xrevrange(f"{name}:weights", count=1)
        step, weights = int(fields[b"step"]), np.frombuffer(fields[b"weights"], np.float32).copy()
        vector_to_parameters(torch.from_numpy(weights), model.parameters())
        backward(model, *batch(step, index))
        # An earlier process of this worker may have died between the two. What it contributed to this step is dropped.
        table.apply_indexed_slices_grad(model.words.weight.grad, local_step=step)
        rest.apply_grad(parameters_to_vector(p.grad for p in model.rest.parameters()), local_step=step)


def train(url, name, workers, steps):
    """Runs the chief, which starts dead workers again."""
    client = redis.Redis.from_url(url)
    table, rest = accumulators(client, name, "chief")
    context = multiprocessing.get_context("spawn")

    def start(index):
        process = context.Process(target=work, args=(url, name, index, steps), daemon=True)
        process.start()
        return process

    processes = [start(index) for index in range(workers)]

    def take(accumulator):
        while True:
            try:
                return accumulator.take_grad(workers, timeout=5)
            except redisacc.TakeTimeoutError as late:
                print(late, flush=True)
                processes[:] = [p if p.is_alive() else start(index) for index, p in enumerate(processes)]

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    try:
        for step in range(steps):
            weights = parameters_to_vector(model.parameters()).detach().numpy()
            client.xadd(f"{name}:weights", {"step": step, "weights": weights.tobytes()}, maxlen=2, approximate=False)
            # The dense accumulator comes last, because it is the second one that a worker applies to.
            indices, values, shape = take(table)
            model.words.weight.grad = torch.sparse_coo_tensor(
                indices[None], values / np.float32(workers), tuple(shape), check_invariants=True
            )
            mean, start_of = torch.from_numpy(take(rest)), 0
            for p in model.rest.parameters():
                p.grad = mean[start_of : start_of + p.numel()].view_as(p)
                start_of += p.numel()
            optimizer.step()
        return model
    finally:
        for process in processes:
            process.terminate()
        for accumulator in (table, rest):
            accumulator.delete()
        client.delete(f"{name}:weights")


def train_alone(workers, steps):
    """Trains in one process, on all parts of a batch at once; returns the model and the losses."""
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses = []
    for step in range(steps):
        parts = [batch(step, index) for index in range(workers)]
        losses.append(backward(model, *map(torch.cat, zip(*parts, strict=True))))
        optimizer.step()
    return model, losses


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--redis", default=os.environ.get("REDISACC_URL", "redis://localhost:6379/0"), metavar="URL")
    parser.add_argument("--name", default="torch-embeddings", help="name of the training")
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()

    together = train(args.redis, args.name, args.workers, args.steps)
    alone, losses = train_alone(args.workers, args.steps)
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
