"""The base of every peer that sends weights: process 0 publishes an array, and each of the others gets it.

The weights are a dense workload: the gradient of worker 0.
"""

import common


class WeightsActor(common.Actor):
    """The process that publishes, or a reader. Subclasses implement ``publish`` and ``read``."""

    @property
    def publishes(self):
        """Whether this process publishes."""
        return self.settings["number"] == 0

    @property
    def name(self):
        """The name of the job's weights."""
        return self.job["workload"]

    @property
    def weights(self):
        """The weights of the job."""
        return self.gradient(self.name, 0, self.job["variant"])[1]

    def ready(self, job):
        """Prepares a job; this is not timed."""
        super().ready(job)
        self.prepare()

    def prepare(self):
        """Prepares a job; this is not timed."""

    def publish(self):
        """Makes weights known to every reader."""
        raise NotImplementedError

    def read(self):
        """Waits for new weights, and returns them."""
        raise NotImplementedError

    def go(self):
        """Publishes or reads."""
        return self.publish() if self.publishes else (None, self.read())

    def check(self, result):
        """Compares what was read with what was published."""
        common.compare(self.job, result, (None, self.weights), self.settings.get("tolerance", 0))
