"""Calls a script that touches no data, over and over, to show how long that looks if the server is suspended in it."""

import platform

import common
import redis


class Caller(common.Actor):
    """Calls one script."""

    def __init__(self, settings):
        super().__init__(settings)
        self.client = redis.Redis.from_url(settings["url"])
        self.sha = self.client.script_load(settings["script"])

    def versions(self):
        """Returns the versions of the packages in use."""
        return {"python": platform.python_version(), "redis": redis.__version__}

    def go(self):
        """Calls the script as often as the job says."""
        for _ in range(self.job["repeat"]):
            self.client.evalsha(self.sha, 0)


common.serve(Caller)
