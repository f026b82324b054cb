"""A worker of synchronous training. Copy this folder to each machine, and start this program once for each worker.

    python worker.py --redis redis://HOST:6379/0 --index 0

It may be started before the chief, killed, and started again at any time.
"""

import argparse
import os

import numpy as np
import redis

import redisacc

FEATURES, BATCH, STEPS, RATE = 8, 64, 100, 0.1


def batch(step, index):
    """Returns the data of worker `index` for that step. It is made up here, and the same after a restart."""
    random = np.random.default_rng([step, index])
    x = random.normal(size=(BATCH, FEATURES))
    return x, x @ np.arange(1.0, FEATURES + 1) + random.normal(scale=0.01, size=BATCH)


def gradient(weights, x, y):
    """Returns the gradient of half the mean squared error."""
    return (x @ weights - y) @ x / len(y)


def newest_weights(client, name, seen):
    """Blocks until the chief has published weights after the entry `seen`; returns the last entry."""
    while not client.xread({f"{name}:weights": seen}, block=1000):
        pass
    [(entry, fields)] = client.xrevrange(f"{name}:weights", count=1)
    return entry, int(fields[b"step"]), np.frombuffer(fields[b"weights"])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--redis", default=os.environ.get("REDISACC_URL", "redis://localhost:6379/0"), metavar="URL")
    parser.add_argument("--name", default="two-machines", help="name of the training, the same for all processes")
    parser.add_argument("--index", type=int, required=True, help="0, 1, 2, …: different for each worker")
    args = parser.parse_args()

    client = redis.Redis.from_url(args.redis)
    worker = f"worker-{args.index}"
    gradients = redisacc.ConditionalAccumulator(
        np.float64, [FEATURES], args.name, once_per_worker=True, redis=client, worker=worker
    )
    seen = "0"
    while True:
        seen, step, weights = newest_weights(client, args.name, seen)
        if step == STEPS:
            break
        # If this worker was killed just after its gradient was counted, or runs twice, the second one is dropped.
        # Otherwise the round would fill without another worker's gradient.
        gradients.apply_grad(gradient(weights, *batch(step, args.index)), local_step=step)
    print(f"{worker}: done", flush=True)


if __name__ == "__main__":
    main()
