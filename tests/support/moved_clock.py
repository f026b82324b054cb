"""The clock of redisacc, moved: for tests that would otherwise wait until a lease, a pause or an expiry is over.

`redisacc/_clock.py` stays as it is for users. Here its functions are replaced, and so are the few places in which a
call waits with a timeout, and those in which scripts and TIME say what time it is on the server: the scripts of a
process get the offset as a literal, because they may read no undeclared key.

A clock is a folder, which processes share. The file `moves` in it holds the offset in seconds and the number of moves;
each process that follows the clock maps it into its memory. It has a file there as well, named after its process id,
with the number of the last move after which it has done all that was due.
"""

import asyncio
import contextlib
import faulthandler
import functools
import importlib
import linecache
import math
import mmap
import os
import re
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import redis

import redisacc
from redisacc._clock import Clock, clock
from redisacc._wire import forks, pubsub, waits
from redisacc._wire.script_loader import load, names
from redisacc._wire.sockets import ClientConnection, SocketConnection

# A process with this variable in its environment follows the clock in that folder.
FOLLOWED = "REDISACC_TEST_CLOCK"

# The clock moves by this much at once, in seconds: what is renewed every second or less often is renewed in time.
STEP = 1.0
# A wait notices a move this much later, in real seconds.
SLICE = 0.005
# How long a move waits for threads, tasks and processes to do what is due, in real seconds.
PATIENCE = 60.0

PACKAGE = str(Path(redisacc.__file__).parent) + os.sep
TESTS = str(Path(__file__).parent.parent) + os.sep

# The line of lua/include/now_ms.lua that reads the server's clock.
READS_CLOCK = "clock_ms = tonumber(time[1]) * 1000"

# A call, as faulthandler writes it.
_CALL = re.compile(r'^  File "(.*)", line (\d+) in ', re.MULTILINE)

# These threads come back to wait, wherever they are now.
RENEWING = ("redisacc-leases", "redisacc-upload")
# What listens for messages waits for the server, not for a time.
LISTENING = "redisacc-events"

Caller = threading.Thread | asyncio.Task[Any]


class MovedClock:
    """A clock that this process follows.

    Args:
        folder: the folder.
        moves: whether this process moves it. Other processes say when they have done what is due.

    Attributes:
        clients: a client of each server on which keys expire earlier if the clock is moved.
    """

    def __init__(self, folder, *, moves):
        self.folder = folder
        self.clients = []
        self._moves = moves
        self._state = _shared(folder / "moves", 2)
        self._undo = []
        self._start()
        self._replace_all()
        # A process that was forked from one that follows it follows it, too.
        global _followed  # noqa: PLW0603
        _followed = self

    def _start(self):
        self._lock = threading.Lock()
        # Caller -> when its wait ends.
        self._waits = {}
        # Those that have waited -> the number of moves when they began to wait last.
        self._known = weakref.WeakKeyDictionary()
        # Held by the thread that moves the clock.
        self._moving = threading.Lock()
        # Opened by each process: one that is forked would write into its parent's, or wait for a lock of `tempfile`
        # that a thread of its parent held.
        self._stacks_file = os.open(self.folder / f"stacks-{os.getpid()}", os.O_RDWR | os.O_CREAT, 0o600)
        if not self._moves:
            state, done = self._state, _shared(self.folder / str(os.getpid()), 1)
            done[0] = state[1]

            def run():
                while True:
                    number = state[1]
                    if number != done[0] and not self._unsettled():
                        done[0] = number
                    time.sleep(SLICE)

            threading.Thread(target=run, name="moved-clock", daemon=True).start()

    def start_in_fork(self):
        """Lets a process that was just forked follow it."""
        self._moves = False
        self._start()

    # For tests

    @property
    def env(self):
        """An environment in which processes follow this clock."""
        site = str(Path(__file__).with_name("following"))
        path = os.pathsep.join(filter(None, (site, os.environ.get("PYTHONPATH"))))
        return {**os.environ, FOLLOWED: str(self.folder), "PYTHONPATH": path}

    def now(self):
        """Returns the time of the clock, in seconds."""
        return clock.now()

    def stop(self):
        """Lets the time of this process pass only when a test advances it."""
        began = clock.now() - self._state[0]
        self._replace(clock, "now", lambda: began + self._state[0])

    def advance(self, seconds):
        """Moves the clock, and waits until all processes that follow it have done what is due.

        Leases of processes, threads and tasks that live do not run out: it moves in steps, and each step waits until
        they have renewed what they hold.
        """
        with self._moving:
            self._settle()
            while seconds > 1e-9:
                step = min(seconds, self._until_due())
                self._move(step)
                seconds -= step

    def jump(self, seconds):
        """Moves the clock at once, as if no process had run meanwhile: leases run out."""
        with self._moving:
            self._settle()
            self._move(seconds)

    def _move(self, seconds):
        # First the keys: what is written between the two lives too long, by a step, and never too short.
        for client in self.clients:
            _shorten_lives(client, seconds)
        self._state[0] += seconds
        self._state[1] += 1
        self._settle()

    @contextlib.contextmanager
    def running(self):
        """Moves the clock as long as the block runs, whenever the block's thread and all others wait for a time."""
        ended = threading.Event()
        failed = []

        def run():
            try:
                while not ended.is_set():
                    if self._waits:
                        self.advance(STEP)
                    time.sleep(SLICE / 5)
            except BaseException as error:
                failed.append(error)

        self._known.setdefault(threading.current_thread(), self._state[1])
        mover = threading.Thread(target=run, name="moved-clock")
        mover.start()
        try:
            yield
        finally:
            ended.set()
            mover.join()
        if failed:
            raise failed[0]

    def restore(self):
        """Lets this process have the real time again."""
        global _followed  # noqa: PLW0603
        _followed = None
        while self._undo:
            self._undo.pop()()
        os.close(self._stacks_file)

    # What is due

    def _until_due(self):
        """For how many seconds at least nobody has anything to do; at least a step."""
        # A caller waits now, or does something, or waits then.
        with self._lock:
            ends = list(self._waits.values())
        if self._followers() or self._awake(math.inf):
            return STEP
        with self._lock:
            ends += self._waits.values()
        return max(min(ends, default=math.inf) - clock.now(), STEP)

    def _settle(self):
        give_up = time.monotonic() + PATIENCE
        while late := self._unsettled() or self._late_followers():
            assert time.monotonic() < give_up, f"the clock was moved, and after {PATIENCE:.0f} s these are busy: {late}"
            time.sleep(SLICE / 5)

    def _unsettled(self):
        """The callers of this process that have to do what is due, or are doing it."""
        with self._lock:
            waiting, number = dict(self._waits), self._state[1]
            renewing = [thread for thread in self._renewing() if self._known.get(thread, -1) < number]
        now = clock.now()
        busy = [caller for caller, end in waiting.items() if end <= now and not _has_ended(caller)]
        busy += [thread for thread in renewing if thread not in waiting]
        # Those that have begun to wait since the last move have done what was due.
        return [_name(caller) for caller in [*busy, *self._awake(number)]]

    def _awake(self, number):
        """The callers that do something in the package, and have not begun to wait since a move of this number."""
        with self._lock:
            waiting = set(self._waits)
            known = {caller for caller, begun in self._known.items() if begun < number}
            # A thread may have a lease before it waits for the first time.
            known |= {thread for thread in threading.enumerate() if thread not in self._known}
        here, stacks = threading.current_thread(), _stacks(self._stacks_file)
        awake = []
        for caller in known - waiting - {here}:
            if _has_ended(caller) or _name(caller) == LISTENING:
                continue
            is_task = isinstance(caller, asyncio.Task)
            if _calls_package(caller) if is_task else _is_in_package(stacks.get(caller.ident, [])):
                awake.append(caller)
        return awake

    def _renewing(self):
        return [thread for thread in threading.enumerate() if thread.name in RENEWING]

    def _followers(self):
        """The files of the processes that follow the clock and run."""
        return [file for file in self.folder.iterdir() if file.name.isdigit() and runs(int(file.name))]

    def _late_followers(self):
        number = self._state[1]
        return [f"process {file.name}" for file in self._followers() if _shared(file, 1)[0] < number]

    def begin(self, caller, end):
        """Notes that a thread or a task waits until a time."""
        with self._lock:
            self._waits[caller] = end
            self._known[caller] = self._state[1]

    def end(self, caller):
        """Notes that it no longer waits."""
        with self._lock:
            self._waits.pop(caller, None)

    def wait(self, seconds, wait):
        """Waits as ``wait`` does, which returns whether that was successful, but for ``seconds`` of this clock."""
        caller, end = threading.current_thread(), clock.now() + seconds
        self.begin(caller, end)
        try:
            while True:
                # With the test, the clock goes back, and listeners would wait for as long as it was ahead.
                left = end - clock.now() if _followed is self else 0.0
                if wait(min(max(left, 0.0), SLICE)):
                    return True
                if left <= 0:
                    return False
        finally:
            self.end(caller)

    # What is replaced

    def _replace(self, thing, name, value):
        self._undo.append(functools.partial(setattr, thing, name, getattr(thing, name)))
        setattr(thing, name, value)

    def _replace_all(self):
        state = self._state

        def sleep(seconds):
            if seconds < 0:
                time.sleep(seconds)
            self.wait(seconds, time.sleep)

        def wait_for_alarm(alarm, timeout):
            self.wait(max(timeout, 0.0), lambda seconds: alarm._lock.acquire(timeout=seconds))

        self._replace(clock, "now", lambda: time.monotonic() + state[0])
        self._replace(clock, "time", lambda: time.time() + state[0])
        self._replace(clock, "sleep", sleep)
        self._replace(waits.ThreadAlarm, "wait", wait_for_alarm)
        # Listeners outlive a test, and for them time would go back.
        self._replace(pubsub, "clock", Clock())
        for connection in (SocketConnection, ClientConnection):
            self._replace(connection, "exchange", self._exchanging(connection.exchange))
        try:
            loop_waits = importlib.import_module("redisacc.asyncio._waits").LoopWaits
        except ImportError:
            return
        init = loop_waits.__init__

        def init_moved(made):
            init(made)
            made.call_later = functools.partial(_Timer, self, made.loop)

        self._replace(loop_waits, "__init__", init_moved)

    def _exchanging(self, exchange):
        """Returns a connection's method ``exchange`` for a server whose clock has moved as well."""

        def exchange_moved(connection, commands, deadline):
            ahead_ms = round(self._state[0] * 1000)
            if not ahead_ms:
                return exchange(connection, commands, deadline)
            replies = exchange(connection, [_moved(command, ahead_ms) for command in commands], deadline)
            for number, command in enumerate(commands):
                if command[0] == "TIME" and isinstance(replies[number], list):
                    seconds, micros = map(int, replies[number])
                    total = seconds * 10**6 + micros + ahead_ms * 1000
                    replies[number] = [b"%d" % (total // 10**6), b"%d" % (total % 10**6)]
            return replies

        return exchange_moved


_followed = None


class _Event(threading.Event):
    """An event of the package. It may outlive the test that made it, and its clock: so it asks which one there is."""

    def wait(self, timeout=None):
        if timeout is None or _followed is None:
            return super().wait(timeout)
        return _followed.wait(timeout, super().wait)


def _event():
    made = _Event()
    forks._locks.add(made)
    return made


forks.event = _event


def server_ms(client):
    """Returns what time it is on a server by the clock that this process follows, in milliseconds since 1970."""
    seconds, micros = client.time()
    ahead = _followed._state[0] if _followed is not None else 0.0
    return int(seconds * 1000 + micros // 1000 + ahead * 1000)


def ahead():
    """Returns by how many seconds scripts that this process runs are ahead of their server's clock."""
    return 0.0 if _followed is None else _followed._state[0]


def follow(folder):
    """Lets this process follow a clock until it ends."""
    MovedClock(Path(folder), moves=False)


def _after_fork_in_child():
    if _followed is not None:
        _followed.start_in_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)


class _Timer:
    """A timer of an event loop that follows a clock."""

    def __init__(
        self,
        moved,
        loop,
        seconds,
        callback,
        *args,
    ):
        self._moved, self._loop, self._call = moved, loop, functools.partial(callback, *args)
        self._end = clock.now() + seconds
        task = asyncio.current_task(loop)
        assert task is not None
        self._task = task
        moved.begin(task, self._end)
        self._look()

    def _look(self):
        left = self._end - clock.now()
        self._handle = (
            self._loop.call_later(min(left, SLICE), self._look) if left > 0 else self._loop.call_soon(self._call)
        )

    def cancel(self):
        self._handle.cancel()
        self._moved.end(self._task)


def _shared(file, numbers):
    """Returns the numbers in a file, which processes share. The file is made if it is missing."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.truncate(descriptor, 8 * numbers)
        return memoryview(mmap.mmap(descriptor, 8 * numbers)).cast("d")
    finally:
        os.close(descriptor)


def runs(pid):
    """Whether a process exists and is neither stopped nor waiting to be collected."""
    try:
        os.kill(pid, 0)
        state = _state(Path(f"/proc/{pid}/stat"))
        if state in "Tt":
            # A thread may still be in a call of the system, such as one that sends a renewal.
            return any(_state(file) not in "Tt" for file in Path(f"/proc/{pid}/task").glob("*/stat"))
        return state not in "ZX"
    except ProcessLookupError:
        return False
    except OSError:
        # This system has no such file.
        return not Path("/proc/self/stat").exists()


def _state(file):
    return file.read_text().rpartition(")")[2].split()[0]


def _name(caller):
    return caller.get_name() if isinstance(caller, asyncio.Task) else caller.name


def _has_ended(caller):
    if isinstance(caller, asyncio.Task):
        return caller.done() or caller.get_loop().is_closed()
    return not caller.is_alive()


def _stacks(descriptor):
    """Returns the file and the line of each call of each thread, the innermost first.

    They are written, to a file, in one call of C: a thread that runs meanwhile would change the frames under a reader
    in Python.
    """
    os.ftruncate(descriptor, 0)
    os.lseek(descriptor, 0, os.SEEK_SET)
    faulthandler.dump_traceback(descriptor, all_threads=True)
    text = os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode(errors="replace")
    _, *threads = re.split(r"^(?:Current thread|Thread) 0x(\w+) .*$", text, flags=re.MULTILINE)
    stacks = zip(threads[::2], threads[1::2], strict=True)
    return {int(ident, 16): [(path, int(line)) for path, line in _CALL.findall(calls)] for ident, calls in stacks}


def _is_in_package(stack):
    """Whether a thread runs code of the package, as opposed to a test's that called it, or that it has called.

    A thread that waits without a timeout until another one has something for it has nothing to do.
    """
    if stack and stack[0][0] == threading.__file__ and linecache.getline(*stack[0]).strip() == "waiter.acquire()":
        return False
    files = [file for file, _ in stack if file.startswith(PACKAGE) or (file.startswith(TESTS) and file != __file__)]
    return bool(files) and files[0].startswith(PACKAGE)


def _calls_package(task):
    """Whether a task awaits code of the package."""
    awaited = task.get_coro()
    while awaited is not None:
        code = getattr(awaited, "cr_code", None)
        if code is not None and code.co_filename.startswith(PACKAGE):
            return True
        awaited = getattr(awaited, "cr_await", None)
    return False


@functools.cache
def _texts():
    """Returns hash -> text of all scripts."""
    scripts = [script for name in names() for script in (load(name), load(name).sharded)]
    assert any(READS_CLOCK in script.text for script in scripts), "lua/include/now_ms.lua has changed"
    return {script.sha: script.text for script in scripts}


def _moved(command, ahead_ms):
    """Returns a command with the text of its script in place of the hash, if it is a script that reads the clock."""
    text = command[1] if command[0] == "EVAL" else _texts().get(command[1], "") if command[0] == "EVALSHA" else ""
    if READS_CLOCK not in text:
        return command
    return ("EVAL", text.replace(READS_CLOCK, f"clock_ms = {ahead_ms} + tonumber(time[1]) * 1000"), *command[2:])


def _shorten_lives(client, seconds):
    """Lets all keys of a server that expire do so earlier."""
    if isinstance(client, redis.RedisCluster):
        for node in client.get_primaries():
            _shorten_lives(client.get_redis_connection(node), seconds)
        return
    keys = list(client.scan_iter(count=1000))
    with client.pipeline(transaction=False) as pipe:
        for key in keys:
            pipe.pttl(key)
        left = pipe.execute()
        for key, ms in zip(keys, left, strict=True):
            if ms > 0:
                pipe.pexpire(key, max(ms - round(seconds * 1000), 0))
        pipe.execute()
