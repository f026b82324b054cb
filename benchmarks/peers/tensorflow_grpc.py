"""TensorFlow's accumulators on a parameter server: one ``ps`` task, a task for each worker, one for the taker.

Each process is a task with a v1 Session on its own master. Every choice favors TensorFlow. Gradients are variables on
the worker's own device, as if its graph had just computed them, so no feed_dict is paid for. The local step and the
(absent) gradient shape are constants on the accumulator's device, so no further tensors are sent. Calls are prepared by
make_callable. oneDNN and the thread pools keep their defaults.
"""

import os
import platform

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import common
import numpy as np
import tensorflow as tf

tf1 = tf.compat.v1
tf1.disable_eager_execution()

# Gradients are never stale; the accumulator counts the steps.
LOCAL_STEP = 2**40
PS = "/job:ps/task:0"


def accumulators(workloads):
    """Makes an accumulator for each workload, on the device of the current scope."""
    made = {}
    for workload in workloads:
        kind = tf1.SparseConditionalAccumulator if workload["kind"] == "sparse" else tf1.ConditionalAccumulator
        made[workload["name"]] = kind(tf.float32, shape=workload["shape"], shared_name=workload["name"])
    return made


def gradient_tensors(initial, indices, values):
    """Returns reads of variables on the current device that hold the arrays; adds initializers to ``initial``."""
    tensors = []
    for array in (indices, values):
        if array is not None:
            content = tf1.placeholder(array.dtype, array.shape)
            variable = tf1.Variable(content, trainable=False, collections=[], use_resource=True)
            initial.append((variable.initializer, {content: array}))
            tensors.append(variable.read_value())
    return tensors


def versions():
    """Returns the versions of the packages in use."""
    return {"python": platform.python_version(), "tensorflow": tf.__version__, "numpy": np.__version__}


class Task(common.Actor):
    """One task of the cluster."""

    def __init__(self, settings):
        super().__init__(settings)
        role, number = settings["role"], settings["number"]
        me = f"/job:{role}/task:{number}"
        self.server = tf1.train.Server(settings["cluster"], job_name=role, task_index=number)
        if role == "ps":
            return
        with tf.device(PS):
            accs = accumulators(settings["workloads"])
        operations, initial = {}, []
        for name, acc in accs.items():
            if role == "worker":
                for variant in range(2):
                    with tf.device(me):
                        tensors = gradient_tensors(initial, *self.gradient(name, number, variant))
                    with tf.device(PS):
                        operations[name, variant] = acc.apply_grad(*tensors, local_step=LOCAL_STEP)
            else:
                with tf.device(PS):
                    operations[name, 0] = operations[name, 1] = acc.take_grad(settings["workers"])
        config = tf1.ConfigProto(device_filters=["/job:ps", me])
        self.session = tf1.Session(self.server.target, config=config)
        for initializer, feed in initial:
            self.session.run(initializer, feed)
        self.calls = {key: self.session.make_callable(operation) for key, operation in operations.items()}

    versions = staticmethod(versions)

    def go(self):
        """Runs the prepared call of the job."""
        taken = self.calls[self.job["workload"], self.job["variant"]]()
        if self.settings["role"] == "worker":
            return None
        if isinstance(taken, np.ndarray):
            return None, taken
        return taken.indices, taken.values


if __name__ == "__main__":
    common.serve(Task)
