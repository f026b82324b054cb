"""Weights by a variable on TensorFlow's parameter server, which readers copy to variables of their own.

As in training with replicas, a reader waits for a token in a queue of its own. Every choice favors TensorFlow, as in
``tensorflow_grpc``.
"""

import common
from tensorflow_grpc import PS, tf, tf1, versions
from weights import WeightsActor


class Task(WeightsActor):
    """One task of the cluster."""

    def __init__(self, settings):
        super().__init__(settings)
        role, number = settings["role"], settings["number"]
        me = f"/job:{role}/task:{number}"
        self.server = tf1.train.Server(settings["cluster"], job_name=role, task_index=number)
        if role == "ps":
            return
        self.initial, operations, self.copies = [], {}, {}
        for name in self.workloads:
            example = self.gradient(name, 0, 0)[1]
            with tf.device(PS):
                shared = self.variable(example, name)
                queues = [
                    tf1.FIFOQueue(10, tf.int64, shapes=[()], shared_name=f"{name}-{reader}")
                    for reader in range(1, settings["workers"])
                ]
            if self.publishes:
                for variant in range(2):
                    with tf.device(me):
                        value = self.variable(self.gradient(name, 0, variant)[1]).read_value()
                    with tf.device(PS):
                        assigned = tf.raw_ops.AssignVariableOp(resource=shared.handle, value=value)
                        with tf.control_dependencies([assigned]):
                            operations[name, variant] = tf.group(*(queue.enqueue(0) for queue in queues))
            else:
                with tf.device(PS), tf.control_dependencies([queues[number - 1].dequeue()]):
                    value = shared.read_value()
                with tf.device(me):
                    self.copies[name] = self.variable(example)
                    operations[name] = tf.raw_ops.AssignVariableOp(resource=self.copies[name].handle, value=value)
        config = tf1.ConfigProto(device_filters=["/job:ps", me])
        self.session = tf1.Session(self.server.target, config=config)
        for initializer, feed in self.initial:
            self.session.run(initializer, feed)
        self.calls = {key: self.session.make_callable(operation) for key, operation in operations.items()}

    def variable(self, value, name=None):
        """Makes a variable on the device of the current scope, to be initialized from an array."""
        content = tf1.placeholder(value.dtype, value.shape)
        variable = tf1.Variable(content, trainable=False, collections=[], use_resource=True, name=name)
        self.initial.append((variable.initializer, {content: value}))
        return variable

    versions = staticmethod(versions)

    def publish(self):
        """Assigns the variable on the parameter server."""
        self.calls[self.name, self.job["variant"]]()

    def read(self):
        """Waits for the token, and copies the variable."""
        self.calls[self.name]()

    def check(self, result):
        """Reads the copy, which is not timed, and compares it with what was published."""
        del result
        super().check((None, self.session.run(self.copies[self.name].read_value())))


common.serve(Task)
