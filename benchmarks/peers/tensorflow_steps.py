"""TensorFlow's synchronous training on a parameter server, as SyncReplicasOptimizer does it.

Variables and accumulators, one of each for every array, live on one ``ps`` task. A worker applies its gradients by one
prepared call. By a second one it waits for its token, and copies the weights into variables of its own; of the tables
it gathers the rows that its next gradient needs. The chief's single call takes all means, updates the variables and
hands out the tokens; everything that it computes stays on the parameter server.

Every choice favors TensorFlow, as in ``tensorflow_grpc``. Each worker has a token queue of its own, so that no worker
gets the token of a slower one and then has to compute its gradient again.
"""

import common
import numpy as np
from steps import StepActor
from tensorflow_grpc import LOCAL_STEP, PS, tf, tf1, versions


class Task(StepActor):
    """One task of the cluster: the parameter server, a worker or the chief."""

    def __init__(self, settings):
        super().__init__(settings)
        self.role, number = settings["role"], settings["number"]
        me = f"/job:{self.role}/task:{number}"
        self.server = tf1.train.Server(settings["cluster"], job_name=self.role, task_index=number)
        if self.role == "ps":
            return
        self.initializers = []
        with tf.device(PS):
            self.shared = {
                leaf["name"]: self.variable(leaf["name"], self.initial[leaf["name"]]) for leaf in self.leaves
            }
            self.accumulators = {leaf["name"]: self.accumulator(leaf) for leaf in self.leaves}
            self.queues = [
                tf1.FIFOQueue(10, tf.int64, shapes=[()], shared_name=f"tokens{worker}")
                for worker in range(settings["workers"])
            ]
        if self.role == "worker":
            self.initializers = []
            made = [self.make_worker(me, variant) for variant in range(2)]
        else:
            made = [self.make_chief()]
        config = tf1.ConfigProto(device_filters=["/job:ps", me])
        self.session = tf1.Session(self.server.target, config=config)
        for initializer, feed in self.initializers:
            self.session.run(initializer, feed)
        self.calls = [[self.session.make_callable(operation) for operation in operations] for operations in made]

    def variable(self, name, value):
        """Makes a variable on the device of the current scope, to be initialized from an array."""
        content = tf1.placeholder(value.dtype, value.shape)
        variable = tf1.Variable(content, trainable=False, collections=[], use_resource=True, name=name)
        self.initializers.append((variable.initializer, {content: value}))
        return variable

    @staticmethod
    def accumulator(leaf):
        """Makes the accumulator of a leaf. Sums of rows are divided by the number of workers afterwards."""
        name = f"{leaf['name']} gradient"
        if leaf["rows"]:
            return tf1.SparseConditionalAccumulator(
                tf.float32, shape=leaf["shape"], shared_name=name, reduction_type="SUM"
            )
        return tf1.ConditionalAccumulator(tf.float32, shape=leaf["shape"], shared_name=name)

    def make_worker(self, me, variant):
        """Makes a worker's two calls for a variant of the gradient."""
        gradient, applied, copies = self.gradient(variant), [], []
        following = self.gradient(1 - variant)
        for name in self.dense:
            with tf.device(me):
                value = self.variable("gradient", gradient[name]).read_value()
            with tf.device(PS):
                applied.append(self.accumulators[name].apply_grad(value, local_step=LOCAL_STEP))
        for name in self.sparse:
            with tf.device(me):
                indices, values = [self.variable("gradient", part).read_value() for part in gradient[name]]
            with tf.device(PS):
                applied.append(self.accumulators[name].apply_grad(indices, values, local_step=LOCAL_STEP))
        with tf.device(PS):
            token = self.queues[self.settings["number"]].dequeue()
            with tf.control_dependencies([token]):
                sources = {name: self.shared[name].read_value() for name in self.dense}
                for name in self.sparse:
                    rows = tf.constant(following[name][0])
                    sources[name] = tf.raw_ops.ResourceGather(
                        resource=self.shared[name].handle, indices=rows, dtype=tf.float32
                    )
        if variant == 0:
            self.copies = {}
            with tf.device(me):
                for name, source in sources.items():
                    self.copies[name] = self.variable("copy", np.zeros(source.shape, np.float32))
        with tf.device(me):
            copies = [
                tf.raw_ops.AssignVariableOp(resource=self.copies[name].handle, value=source)
                for name, source in sources.items()
            ]
        return tf.group(*applied), tf.group(*copies)

    def make_chief(self):
        """Makes the chief's call."""
        workers, updates = self.settings["workers"], []
        with tf.device(PS):
            for name in self.dense:
                mean = self.accumulators[name].take_grad(workers)
                updates.append(
                    tf.raw_ops.ResourceApplyGradientDescent(
                        var=self.shared[name].handle, alpha=tf.constant(np.float32(self.rate)), delta=mean
                    )
                )
            for name in self.sparse:
                total = self.accumulators[name].take_indexed_slices_grad(workers)
                change = total.values * np.float32(self.rate / workers)
                updates.append(
                    tf.raw_ops.ResourceScatterSub(
                        resource=self.shared[name].handle, indices=total.indices, updates=change
                    )
                )
            with tf.control_dependencies(updates):
                tokens = [queue.enqueue(tf.constant(0, tf.int64)) for queue in self.queues]
        return (tf.group(*tokens),)

    versions = staticmethod(versions)

    def weights(self):
        """Returns the weights that this process has. They are read for this, by the side of the benchmark."""
        if self.role == "worker":
            found = self.session.run({name: copy.read_value() for name, copy in self.copies.items()})
            # The rows that the next gradient needs.
            following = self.gradient(self.step % 2)
            return found | {name: (following[name][0], found[name]) for name in self.sparse}
        return self.session.run({name: variable.read_value() for name, variable in self.shared.items()})

    def go(self):
        """Does this task's part of each step."""
        for _ in range(self.job["repeat"]):
            for call in self.calls[self.step % len(self.calls)]:
                call()
            self.step += 1


common.serve(Task)
