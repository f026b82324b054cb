"""TensorFlow's accumulators in one process, with a thread for each worker and no network. Its state ends with it."""

import threading

import common
import numpy as np
from tensorflow_grpc import LOCAL_STEP, accumulators, gradient_tensors, tf1, versions


class Local(common.Actor):
    """All workers and the taker, in one process."""

    def __init__(self, settings):
        super().__init__(settings)
        accs = accumulators(settings["workloads"])
        initial, applies, takes = [], {}, {}
        for name, acc in accs.items():
            takes[name] = acc.take_grad(settings["workers"])
            for worker in range(settings["workers"]):
                for variant in range(2):
                    tensors = gradient_tensors(initial, *self.gradient(name, worker, variant))
                    applies[name, worker, variant] = acc.apply_grad(*tensors, local_step=LOCAL_STEP)
        self.session = tf1.Session()
        for initializer, feed in initial:
            self.session.run(initializer, feed)
        self.applies = {key: self.session.make_callable(operation) for key, operation in applies.items()}
        self.takes = {key: self.session.make_callable(operation) for key, operation in takes.items()}
        self.signals = [threading.Semaphore(0) for _ in range(settings["workers"])]
        for worker in range(settings["workers"]):
            threading.Thread(target=self.work, args=(worker,), daemon=True).start()

    versions = staticmethod(versions)

    def work(self, worker):
        """Applies the gradients of one worker, one for each signal."""
        while True:
            self.signals[worker].acquire()
            self.applies[self.job["workload"], worker, self.job["variant"]]()

    def go(self):
        """Signals all workers, and takes the round."""
        for signal in self.signals:
            signal.release()
        taken = self.takes[self.job["workload"]]()
        return (None, taken) if isinstance(taken, np.ndarray) else (taken.indices, taken.values)


common.serve(Local)
