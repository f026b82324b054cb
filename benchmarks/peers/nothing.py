"""Calls a script that touches nothing, over and over: how long that seems when the server is put aside in it."""

import platform

import common
import redis


class Caller(common.Actor):
    def __init__(self, settings):
        super().__init__(settings)
        self.client = redis.Redis.from_url(settings["url"])
        self.sha = self.client.script_load(settings["script"])

    def versions(self):
        return {"python": platform.python_version(), "redis": redis.__version__}

    def go(self):
        for _ in range(self.job["repeat"]):
            self.client.evalsha(self.sha, 0)


common.serve(Caller)
