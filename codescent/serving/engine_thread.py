"""In: prompts and other work, from the event loop. Out: what each step of the engine gives, back in the loop.
Does not know HTTP or texts of requests: generate.py and prompts.py do."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, TypeVar

from codescent.base.errors import UserError
from codescent.inference.engine import Engine
from codescent.inference.request import Finish, Output, Sampling
from codescent.serving.refused import RefusedRequest
from codescent.serving.watch import Watch

T = TypeVar("T")
MOST_SHOWN = 8
"""So many problems of a prompt are said."""
Wanted = tuple[Sequence[int], Sampling]
"""A prompt, and how it is continued."""
RETRY_S = 1
"""A client that is refused because others wait may try again after so many seconds."""


class _Row:
    """One prompt of a flight: its place there, and its id in the engine once it has one."""

    def __init__(self, flight: RequestFlight, index: int) -> None:
        self.flight, self.index = flight, index
        self.request: int | None = None
        self.cancelled = False


class RequestFlight:
    """The rows of one request of HTTP, from its beginning to its last token. Belongs to the event loop.

    Attributes:
        begin_s: when the request came, by time.monotonic.
    """

    def __init__(self, thread: EngineThread, wanted: Sequence[Wanted], begin_s: float) -> None:
        self.begin_s = begin_s
        self._thread, self._wanted = thread, wanted
        self._arrived = asyncio.Queue[tuple[int, Output] | Exception]()
        self._left = set(range(len(wanted)))
        self._rows = [_Row(self, index) for index in range(len(wanted))]
        self._last_s = [0.0] * len(wanted)

    async def next(self) -> tuple[int, Output] | None:
        """The next output and the index of its row; None: all rows have ended.

        Raises RefusedRequest: the engine refuses a prompt, or the model gave no finite logits.
        """
        if not self._left:
            return None
        arrived = await self._arrived.get()
        if isinstance(arrived, Exception):
            raise arrived
        index, output = arrived
        if output.finished is not None:
            self._left.discard(index)
            if output.finished is Finish.ERROR:
                raise RefusedRequest(500, output.error)
        return index, output

    def cancel(self) -> None:
        """End the rows that have not ended."""
        for index in self._left:
            self._thread.cancel(self._rows[index])
        self._left = set()

    def put(self, what: tuple[int, Output] | Exception) -> None:
        """Called in the event loop, when something has arrived. Times are measured here: a client may read later."""
        if not isinstance(what, Exception):
            self._measure(*what)
        self._arrived.put_nowait(what)

    def rows(self) -> Iterator[tuple[_Row, Wanted]]:
        """Each row and what it wants."""
        yield from zip(self._rows, self._wanted, strict=True)

    def _measure(self, index: int, output: Output) -> None:
        if output.token is None:
            return
        now_s, before_s = time.monotonic(), self._last_s[index]
        self._thread.watch.token(now_s - (before_s or self.begin_s), is_first=not before_s)
        self._last_s[index] = now_s


class EngineThread:
    """Drives an engine in a thread of its own. All methods but `_work` and what it calls belong to the event loop.

    Attributes:
        failure: why the engine has stopped for good; "": it has not.
        on_failure: called in the event loop when that happens.
    """

    def __init__(self, engine: Engine, rows: int, most_waiting: int, watch: Watch) -> None:
        """`rows`: requests that run at a time; `most_waiting`: how many more may wait."""
        self.watch, self.failure = watch, ""
        self.on_failure: Callable[[], None] = lambda: None
        self._engine, self._most_open = engine, rows + most_waiting
        self._open = 0
        self._inbox = SimpleQueue[Callable[[], None] | None]()
        self._beside = deque[Callable[[], None]]()
        self._by_request: dict[int, _Row] = {}
        self._flights = set[RequestFlight]()
        self._calls = set[asyncio.Future[Any]]()
        self._thread = Thread(target=self._work, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop

    @property
    def engine(self) -> Engine:
        """The engine, for reading its counts."""
        return self._engine

    @property
    def open(self) -> int:
        """Rows that wait or run."""
        return self._open

    def start(self) -> None:
        """Begin to work, for the event loop that is running."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def close(self) -> None:
        """End the thread, after the step that it is in."""
        self._inbox.put(None)
        await asyncio.to_thread(self._thread.join)

    @contextmanager
    def places(self, count: int) -> Iterator[None]:
        """A block in which `count` rows may be open. Raises RefusedRequest 429 or 503: there is no place for them."""
        self._refuse_failed()
        if count > self._most_open:
            raise RefusedRequest(400, f"{count} texts in one request: {self._most_open} may be asked for at a time")
        if self._open + count > self._most_open:
            said = f"{self._open} texts run or wait, and at most {self._most_open} may; try again later"
            raise RefusedRequest(429, said, code="rate_limit_exceeded", retry_s=RETRY_S)
        self._open += count
        try:
            yield
        finally:
            self._open -= count

    @contextmanager
    def fly(self, wanted: Sequence[Wanted], begin_s: float) -> Iterator[RequestFlight]:
        """Give prompts to the engine. What has not ended when the block ends is cancelled.

        `begin_s`: when their request came, by time.monotonic.
        """
        self._refuse_failed()
        flight = RequestFlight(self, wanted, begin_s)
        self._flights.add(flight)
        self._inbox.put(lambda: self._add(flight))
        try:
            yield flight
        finally:
            self._flights.remove(flight)
            flight.cancel()

    def cancel(self, row: _Row) -> None:
        """End a row; what it gives from now on is dropped."""
        self._inbox.put(lambda: self._cancel(row))

    async def call(self, work: Callable[[], T]) -> T:
        """Do something with the model between two steps. Raises what `work` raises."""
        self._refuse_failed()
        future: asyncio.Future[T] = self._loop.create_future()

        def act() -> None:
            try:
                result = work()
            except BaseException as error:
                self._tell(_settle, future, None, error)
            else:
                self._tell(_settle, future, result, None)

        self._calls.add(future)
        self._inbox.put(lambda: self._beside.append(act))
        try:
            return await future
        finally:
            self._calls.remove(future)

    def _refuse_failed(self) -> None:
        if self.failure:
            raise RefusedRequest(503, f"the engine has stopped: {self.failure}")

    # In the thread

    def _work(self) -> None:
        try:
            while self._take():
                if self._engine.busy:
                    self._give(self._engine.step())
                for _ in range(len(self._beside)):  # all of them: a log of requests must not fall behind the steps
                    self._beside.popleft()()
        except BaseException as error:  # a panic of a library in Rust is no Exception
            self._tell(self._fail, _in_words(error))

    def _take(self) -> bool:
        """Do what has come into the inbox; wait for it if there is nothing else to do. False: the thread shall end."""
        try:
            item = self._inbox.get(block=not (self._engine.busy or self._beside))
            while item is not None:
                item()
                item = self._inbox.get_nowait()
        except Empty:
            return True
        return False

    def _add(self, flight: RequestFlight) -> None:
        for row, (prompt, sampling) in flight.rows():
            if row.cancelled:
                continue
            try:
                row.request = self._engine.add(prompt, sampling)
            except UserError as error:
                return self._tell(flight.put, RefusedRequest(400, _in_words(error)))
            except BaseException as error:  # such as a fault of the library of grammars: the other requests go on
                return self._tell(flight.put, RefusedRequest(500, f"it cannot be begun: {_in_words(error)}"))
            self._by_request[row.request] = row

    def _cancel(self, row: _Row) -> None:
        row.cancelled = True
        if row.request is not None:
            self._engine.cancel(row.request)

    def _give(self, outputs: Sequence[Output]) -> None:
        given = []
        for output in outputs:
            row = self._by_request[output.request] if output.finished is None else self._by_request.pop(output.request)
            if not row.cancelled:
                given.append((row, output))
        if given:
            self._tell(_hand_out, given)

    def _tell(self, act: Callable[..., None], *arguments: object) -> None:
        """Have something done in the event loop, if there still is one."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(act, *arguments)

    def _fail(self, said: str) -> None:
        """In the event loop: the thread has ended with an error."""
        self.failure = said
        error = RefusedRequest(500, f"the engine has stopped: {said}")
        for flight in self._flights:
            flight.put(error)
        for future in self._calls:
            _settle(future, None, error)
        self.on_failure()


def _in_words(error: BaseException) -> str:
    if isinstance(error, UserError):
        return "; ".join(error.problems[:MOST_SHOWN])
    return f"{type(error).__name__}: {error}"


def _hand_out(given: Sequence[tuple[_Row, Output]]) -> None:
    for row, output in given:
        row.flight.put((row.index, output))


def _settle(future: asyncio.Future[T], result: T, error: BaseException | None) -> None:
    if not future.done():
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)
