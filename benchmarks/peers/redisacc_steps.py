"""A worker or the chief of redisacc, with Chief and Worker or with TreeAccumulator and Parameters."""

import time

import common
import numpy as np
from redisacc_peer import versions
from steps import StepActor

import redisacc

TIMEOUT = 120


class Peer(StepActor):
    """A process of the training."""

    versions = staticmethod(versions)

    def open_accumulator(self):
        """Opens the accumulator of the model."""
        options = self.settings.get("options", {})
        self.accumulator = redisacc.TreeAccumulator.like(
            self.initial, self.model["name"], sparse=self.sparse, redis=self.settings["url"], **options
        )

    def open_parameters(self):
        """Opens the parameters of the model."""
        self.parameters = redisacc.Parameters(
            self.model["name"], redis=self.settings["url"], **self.settings.get("parameters", {})
        )

    def descend(self, weights, gradient):
        """Subtracts a gradient from weights. Returns which rows that has changed."""
        for name in self.dense:
            change = gradient[name]
            change *= np.float32(self.rate)
            weights[name] -= change
        changed = {}
        for name in self.sparse:
            rows = gradient[name]
            change = rows.values
            change *= np.float32(self.rate)
            weights[name][rows.indices] -= change
            changed[name] = rows.indices
        return changed


class DirectChief(Peer):
    """The chief, by TreeAccumulator and Parameters."""

    def __init__(self, settings):
        super().__init__(settings)
        self.open_accumulator()
        self.open_parameters()
        self.parameters.publish(self.initial, 0)
        self.own = {name: array.copy() for name, array in self.initial.items()}

    def weights(self):
        """Returns the weights that this process has."""
        return self.own

    def go(self):
        """Does the chief's part of each step."""
        for _ in range(self.job["repeat"]):
            with self.accumulator.take(self.settings["workers"], timeout=TIMEOUT) as taken:
                changed = self.descend(self.own, taken.gradient)
                self.step += 1
                self.parameters.publish(self.own, self.step, changed=changed)


class DirectWorker(Peer):
    """A worker, by TreeAccumulator and Parameters."""

    def __init__(self, settings):
        super().__init__(settings)
        self.open_accumulator()
        self.open_parameters()
        self.gradients = [self.gradient(variant) for variant in range(2)]
        _, self.own = self.parameters.wait(timeout=TIMEOUT)

    def weights(self):
        """Returns the weights that this process has."""
        return self.own

    def go(self):
        """Does a worker's part of each step."""
        for _ in range(self.job["repeat"]):
            result = self.accumulator.apply_grad(self.gradients[self.step % 2], local_step=self.step)
            if not result:
                raise common.WrongResult(f"step {self.step}: {result}")
            before = self.step
            self.step, self.own = self.parameters.wait(after=before, timeout=TIMEOUT)
            if self.step != before + 1:
                raise common.WrongResult(f"step {self.step} follows step {before}")


class LoopChief(Peer):
    """The chief, by Chief."""

    def __init__(self, settings):
        super().__init__(settings)
        own = {name: array.copy() for name, array in self.initial.items()}
        self.chief = redisacc.Chief(
            self.model["name"],
            own,
            workers=settings["workers"],
            accumulator={"sparse": self.sparse, **settings.get("gradient_options", {})},
            redis=settings["url"],
            **settings.get("chief_options", {}),
        )
        self.rounds = self.chief.rounds()

    def weights(self):
        """Returns the weights that this process has."""
        return self.chief.parameters

    def go(self):
        """Does the chief's part of each step."""
        chief = self.chief
        for _ in range(self.job["repeat"]):
            taken = next(self.rounds)
            changed = self.descend(chief.parameters, taken.gradient)
            chief.publish(chief.parameters, changed=changed)
            self.step = chief.step


class LoopWorker(Peer):
    """A worker, by Worker."""

    def __init__(self, settings):
        super().__init__(settings)
        options = settings.get("worker_options", {})
        self.worker = redisacc.Worker(self.model["name"], number=settings["number"], redis=settings["url"], **options)
        self.gradients = [self.gradient(variant) for variant in range(2)]
        self.steps = self.worker.steps()
        self.own = None

    def weights(self):
        """Returns the weights that this process has."""
        return self.own

    def apply(self, gradient):
        """Applies a gradient, and returns the result."""
        return self.worker.apply(gradient)

    def go(self):
        """Does a worker's part of each step."""
        if self.own is None:
            # The chief publishes it in its own first step.
            _, self.own = next(self.steps)
        for _ in range(self.job["repeat"]):
            result = self.apply(self.gradients[self.step % 2])
            if not result:
                raise common.WrongResult(f"step {self.step}: {result}")
            before = self.step
            self.step, self.own = next(self.steps)
            if self.step != before + 1:
                raise common.WrongResult(f"step {self.step} follows step {before}")


class WorkerWithBackwardPass(LoopWorker):
    """A worker, by Worker, that sleeps between the leaves of its gradient, from the last to the first."""

    def backward(self, gradient):
        """Yields the path of each leaf when its gradient would be there."""
        started, seconds = time.monotonic(), self.settings["backward"] / len(gradient)
        for number, path in enumerate(reversed(gradient), 1):
            time.sleep(max(started + number * seconds - time.monotonic(), 0))
            yield path

    def apply(self, gradient):
        """Applies a gradient after the backward pass, and returns the result."""
        for _ in self.backward(gradient):
            pass
        return super().apply(gradient)


class StreamingWorker(WorkerWithBackwardPass):
    """The same, whose leaves leave during the backward pass."""

    def apply(self, gradient):
        """Streams a gradient, and returns the result."""
        with self.worker.begin() as upload:
            for path in self.backward(gradient):
                upload.put(path, gradient[path])
            return upload.commit()


class UpdatingChief(Peer):
    """The chief, with an optimizer."""

    def __init__(self, settings):
        super().__init__(settings)
        self.chief = redisacc.Chief(
            self.model["name"],
            self.initial,
            workers=settings["workers"],
            accumulator={"sparse": self.sparse, **settings.get("gradient_options", {})},
            optimizer=redisacc.optim.SGD(self.rate),
            redis=settings["url"],
            **settings.get("chief_options", {}),
        )
        self.updates = self.chief.updates()

    def weights(self):
        """Returns nothing, because it has no weights. The workers compare theirs."""
        return {}

    def go(self):
        """Does the chief's part of each step."""
        for _ in range(self.job["repeat"]):
            self.step = next(self.updates)


ACTORS = {
    ("direct", "taker"): DirectChief,
    ("direct", "worker"): DirectWorker,
    ("loop", "taker"): LoopChief,
    ("loop", "worker"): LoopWorker,
    ("updates", "taker"): UpdatingChief,
    ("updates", "worker"): LoopWorker,
    ("after", "taker"): UpdatingChief,
    ("after", "worker"): WorkerWithBackwardPass,
    ("streamed", "taker"): UpdatingChief,
    ("streamed", "worker"): StreamingWorker,
}
common.serve(lambda settings: ACTORS[settings["method"], settings["role"]](settings))
