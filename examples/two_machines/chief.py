"""The chief of synchronous training. It waits for a gradient from each worker, moves the weights and publishes them.

    python chief.py --redis redis://HOST:6379/0 --workers 2

It may be killed and started again at any time. At the end it trains once more, alone, and compares the weights.
"""

import argparse
import os

import numpy as np
import redis
from worker import FEATURES, RATE, STEPS, batch, gradient

import redisacc


class Model:
    """The weights and the step that they belong to. They outlive this process in a Redis stream."""

    def __init__(self, client, name):
        self.client, self.key = client, f"{name}:weights"
        self.step, self.weights = 0, np.zeros(FEATURES)
        if last := client.xrevrange(self.key, count=1):
            [(_, fields)] = last
            self.step, self.weights = int(fields[b"step"]), np.frombuffer(fields[b"weights"])
        else:
            self.publish()

    def publish(self):
        self.client.xadd(self.key, {"step": self.step, "weights": self.weights.tobytes()}, maxlen=2, approximate=False)

    def update(self, taken):
        if taken.global_step < self.step:
            # An earlier chief published the weights, and died before it acknowledged the round.
            return
        self.weights = self.weights - RATE * taken.gradient
        self.step = taken.global_step + 1
        self.publish()


def train_alone(workers):
    """Trains in this process, and returns the weights."""
    weights = np.zeros(FEATURES)
    for step in range(STEPS):
        weights -= RATE * np.mean([gradient(weights, *batch(step, index)) for index in range(workers)], axis=0)
    return weights


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--redis", default=os.environ.get("REDISACC_URL", "redis://localhost:6379/0"), metavar="URL")
    parser.add_argument("--name", default="two-machines", help="name of the training, the same for all processes")
    parser.add_argument("--workers", type=int, required=True, help="number of workers")
    args = parser.parse_args()

    client = redis.Redis.from_url(args.redis)
    gradients = redisacc.ConditionalAccumulator(
        np.float64, [FEATURES], args.name, once_per_worker=True, redis=client, worker="chief"
    )
    model = Model(client, args.name)
    with gradients.recover() as left:
        # The round that an earlier chief had taken when it died.
        if left is not None:
            model.update(left)
    while model.step < STEPS:
        with gradients.take(args.workers) as taken:
            model.update(taken)
            if model.step % 25 == 0:
                print(f"step {model.step}: gradients from {', '.join(taken.workers)}", flush=True)

    difference = np.abs(model.weights - train_alone(args.workers)).max()
    print(f"largest difference from training alone: {difference:.1e}")
    gradients.delete()
    client.expire(model.key, 60)  # workers still have to read there that the training is over
    if not difference < 1e-12:
        raise SystemExit("the difference is larger than rounding explains")


if __name__ == "__main__":
    main()
