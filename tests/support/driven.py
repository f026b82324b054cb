"""Handles of redisacc.asyncio that tests use like blocking ones, so that one suite of behaviour is for both.

Each thread of a test has a task of its own on the loop, which carries out its calls. An interrupt of a call cancels it.
"""

import asyncio
import concurrent.futures
import contextlib
import functools
import inspect
import threading
from collections.abc import AsyncIterator

import redis.asyncio

import redisacc
import redisacc.asyncio

KINDS = {
    getattr(redisacc, name): getattr(redisacc.asyncio, name)
    for name in (
        "ConditionalAccumulator",
        "SparseConditionalAccumulator",
        "TreeAccumulator",
        "Parameters",
        "Chief",
        "Worker",
    )
}


class Driver:
    """An event loop in a thread, on which other threads have calls carried out."""

    def __init__(self):
        self._loop = asyncio.new_event_loop()
        self._local = threading.local()
        self._tasks = []
        # Tasks that are carrying out a call.
        self._calling = set()
        self._thread = threading.Thread(target=self._loop.run_forever, name="asyncio-driver", daemon=True)
        self._thread.start()

    def run(self, function):
        """Calls a function on the loop, awaits what it returns if that can be awaited, and returns the result."""
        done = concurrent.futures.Future()
        self._loop.call_soon_threadsafe(self._queue().put_nowait, (function, done))
        try:
            return done.result()
        except redisacc.asyncio.OutcomeUnknownError as error:
            # For the compiler's sake: its own name ends with the block.
            unknown = error
            raise redisacc.OutcomeUnknownError(str(error), lambda: self.run(unknown.settle)) from error
        except BaseException:
            if not done.done():
                self._loop.call_soon_threadsafe(self._local.task.cancel)
                concurrent.futures.wait([done])
            raise

    def canceller(self):
        """Returns a function that cancels the call that the calling thread has on the loop, if there is one.

        Any thread may call it.
        """
        self._queue()
        task, calling = self._local.task, self._calling

        def cancel():
            if task in calling:
                task.cancel()

        return lambda: self._loop.call_soon_threadsafe(cancel) and None

    def is_here(self):
        """Returns whether the caller is in the thread of the loop."""
        return threading.current_thread() is self._thread

    def _queue(self):
        if not hasattr(self._local, "queue"):
            started = concurrent.futures.Future()

            def start():
                queue = asyncio.Queue()
                task = self._loop.create_task(_carry_out(queue, self._calling))
                self._tasks.append(task)
                started.set_result((queue, task))

            self._loop.call_soon_threadsafe(start)
            self._local.queue, self._local.task = started.result()
        return self._local.queue

    def close(self):
        """Ends the loop, its tasks and its threads."""

        async def end():
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            assert not left, f"tasks left behind: {left}"
            await self._loop.shutdown_default_executor()

        try:
            asyncio.run_coroutine_threadsafe(end(), self._loop).result(20)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(20)
            self._loop.close()


async def _carry_out(queue, calling):
    task = asyncio.current_task()
    assert task is not None
    while True:
        function, done = await queue.get()
        calling.add(task)
        try:
            await _carry_out_one(function, done)
        except asyncio.CancelledError as error:
            task.uncancel()
            done.set_exception(error)
        finally:
            calling.discard(task)
        # What it has returned must not live for as long as the next call does not come.
        del function, done


async def _carry_out_one(function, done):
    try:
        value = function()
        done.set_result(await value if inspect.isawaitable(value) else value)
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        done.set_exception(error)


def _for_asyncio(client):
    """Returns a client for asyncio with the settings of a blocking one."""
    given = client.connection_pool.connection_kwargs
    settings = {name: given[name] for name in ("host", "port", "db", "path", "client_name") if name in given}
    return redis.asyncio.Redis(**settings)


class DrivenClient:
    """What a test gets instead of a client: it opens handles of redisacc.asyncio."""

    def __init__(self, client):
        self._driver = Driver()
        self._client = _for_asyncio(client)

    def open(self, kind, *args, **options):
        """Opens a handle of the class for asyncio that corresponds to a blocking one."""
        where = options.get("redis")
        if where is self:
            options["redis"] = self._client
        elif isinstance(where, redis.Redis):
            options["redis"] = _for_asyncio(where)
        make = getattr(kind, "__self__", kind)
        kind = KINDS[make] if make is kind else getattr(KINDS[make], kind.__name__)
        # A handle can be awaited, which opens it.
        return Driven(self._driver, self._driver.run(lambda: kind(*args, **options)))

    def canceller(self):
        """Returns a function that cancels the call that the calling thread has under way; see ``Driver.canceller``."""
        return self._driver.canceller()

    def close(self):
        """Ends the loop."""
        self._driver.close()


class Driven:
    """A handle of redisacc.asyncio that is used like a blocking one."""

    def __init__(self, driver, handle):
        self._driver = driver
        self._driven = handle

    def __repr__(self):
        return repr(self._driven).removeprefix("asyncio.")

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()

    def __iter__(self):
        return self

    def __next__(self):
        try:
            return self._driver.run(self._driven.__anext__)
        except StopAsyncIteration:
            raise StopIteration from None

    def __getattr__(self, name):
        if self._driver.is_here():
            # Called by what a test has put into the middle of a call, which is the place of a blocking one.
            return getattr(self._driven.blocking, name)
        # A test may look inside of a handle: what only the blocking one has is what it looks for.
        inside = self._driven if hasattr(type(self._driven), name) else self._driven.blocking
        value = getattr(inside, name)
        return functools.partial(self._call, name, value) if callable(value) else value

    def _call(self, name, method, /, *args, **options):
        if self._driver.is_here():
            # As in __getattr__: a test has put the method itself into the middle of a call.
            return getattr(self._driven.blocking, name)(*args, **options)

        def call():
            value = method(*args, **options)
            return value if inspect.iscoroutine(value) else contextlib.nullcontext(value)

        value = self._driver.run(call)
        if isinstance(value, redisacc.asyncio.Upload):
            return Driven(self._driver, value)
        if not isinstance(value, contextlib.nullcontext):
            return value
        value = value.enter_result
        if isinstance(value, redisacc.asyncio.Events):
            self._driver.run(value.__aenter__)
        if isinstance(value, AsyncIterator):
            return Driven(self._driver, value)
        if isinstance(value, contextlib.AbstractAsyncContextManager):
            return self._block(value)
        return value

    @contextlib.contextmanager
    def _block(self, block):
        value = self._driver.run(block.__aenter__)
        try:
            yield value
        except GeneratorExit:
            # A test never ended the block, and Python collects it now, perhaps after the loop was closed.
            raise
        except BaseException as error:
            if not self._driver.run(functools.partial(block.__aexit__, type(error), error, error.__traceback__)):
                raise
        else:
            self._driver.run(functools.partial(block.__aexit__, None, None, None))
