"""The driver as a child process that may die: started when needed, and again after TensorFlow aborted."""

import json
import os
import queue
import subprocess
import threading
from pathlib import Path

DRIVER = Path(__file__).with_name("tensorflow_driver.py")


class TensorFlowProcess:
    """TensorFlow's accumulators, behind a Python that has TensorFlow."""

    def __init__(self, python, *, start_timeout=120.0, step_timeout=60.0):
        self._python = python
        self._start_timeout = start_timeout
        self._step_timeout = step_timeout
        self._process = None
        self._lines = queue.Queue()
        self.version = ""
        self.aborted = 0

    def __enter__(self):
        self._start()
        return self

    def __exit__(self, kind, error, trace):
        self._end()

    def _start(self):
        environment = dict(os.environ, TF_CPP_MIN_LOG_LEVEL="1", TF_ENABLE_ONEDNN_OPTS="0")
        self._process = subprocess.Popen(
            [self._python, str(DRIVER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        self._lines = queue.Queue()
        threading.Thread(target=self._read, args=(self._process, self._lines), daemon=True).start()
        hello = self._next(self._start_timeout)
        if hello is None:
            self._end()
            raise RuntimeError(f"{self._python} {DRIVER.name} ended at once: does it have tensorflow-cpu?")
        self.version = str(hello["version"])

    @staticmethod
    def _read(process, lines):
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line)
        lines.put(None)

    def _next(self, timeout):
        """The next line, or None when the process is gone."""
        try:
            line = self._lines.get(timeout=timeout)
        except queue.Empty:
            self._end()
            raise TimeoutError(f"TensorFlow said nothing for {timeout} s") from None
        return None if line is None else json.loads(line)

    def _end(self):
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def run(self, case):
        """The outcomes of a case: {"construction": OUTCOME, "outcomes": [OUTCOME...]}.

        Where the process died, the last outcome is {"aborted": true} and the operations after it have none.
        """
        if self._process is None:
            self._start()
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(case) + "\n")
        self._process.stdin.flush()
        lines = []
        while (line := self._next(self._step_timeout)) is not None:
            if "done" in line:
                break
            lines.append(line.get("construction", line))
        else:
            lines.append({"aborted": True})
            self.aborted += 1
            self._end()
        return {"construction": lines[0], "outcomes": lines[1:]}
