"""Small things that several test files of the outbox say."""

import asyncio
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import outbox.connection
from outbox.database import SQLiteStore
from outbox.models import OrderCreate, OutboxEvent

ORDER = OrderCreate.model_validate({"customer_email": "ada@example.com", "amount": "149.90"})


def rows(db_path: Path, sql: str, *values: Any) -> list[tuple[Any, ...]]:
    """What another connection sees: only what was committed."""
    connection = sqlite3.connect(db_path, isolation_level=None)
    try:
        return connection.execute(sql, values).fetchall()
    finally:
        connection.close()


def orders_and_events(db_path: Path) -> tuple[int, int]:
    orders, events = rows(db_path, "SELECT (SELECT count(*) FROM orders), (SELECT count(*) FROM outbox)")[0]
    return orders, events


async def add_event(store: SQLiteStore, aggregate_id: str = "aggregate-1", **payload: Any) -> OutboxEvent:
    async with store.transaction() as conn:
        return await store.add_event(conn, event_type="test.happened", aggregate_id=aggregate_id, payload=payload)


# --- nothing is left behind ---


def write_lock_is_free(db_path: Path) -> bool:
    with closing(sqlite3.connect(db_path, timeout=0, isolation_level=None)) as connection:
        try:
            connection.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            return False
        connection.execute("ROLLBACK")
        return True


def database_thread_is_at_work() -> bool:
    """True while a thread is inside the package's code: waiting for a lock, say, or running a statement."""
    package = str(Path(outbox.connection.__file__).parent)
    frames = sys._current_frames()
    threads = [thread for thread in threading.enumerate() if thread is not threading.current_thread()]
    return any(
        thread.ident in frames and frames[thread.ident].f_code.co_filename.startswith(package) for thread in threads
    )


def assert_nothing_is_left_running(db_path: Path) -> None:
    """No task, no thread, no lock, no half of an order."""
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert not database_thread_is_at_work()
    assert write_lock_is_free(db_path)
    orders, events = orders_and_events(db_path)
    assert orders == events


async def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Return when `condition` holds; a `TimeoutError` means that it never came true, not that it was slow."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.001)


# --- a cancellation at a chosen await ---


class CancelledAt(Awaitable[None]):
    """Drives a coroutine and cancels its task at the chosen suspensions: as it falls asleep, or as it would wake up."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], suspensions: set[int], on_waking: bool) -> None:
        self._coroutine = coroutine
        self._suspensions = suspensions
        self._on_waking = on_waking
        self.suspended = 0

    def __await__(self) -> Generator[Any, Any, None]:
        task = asyncio.current_task()
        assert task is not None
        resume: Callable[[], Any] = partial(self._coroutine.send, None)
        while True:
            try:
                future = resume()
            except StopIteration:
                return
            if self.suspended in self._suspensions:
                if self._on_waking and future is not None:
                    future.add_done_callback(lambda _: task.cancel())
                else:
                    task.cancel()
            self.suspended += 1
            try:
                yield future
            except BaseException as error:
                resume = partial(self._coroutine.throw, error)
            else:
                resume = partial(self._coroutine.send, None)


# --- another process ---

_HOLD_THE_WRITE_LOCK = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("BEGIN IMMEDIATE")
print("locked", flush=True)
sys.stdin.read()
"""


@contextmanager
def locked_by_another_process(db_path: Path) -> Iterator[Callable[[], None]]:
    """Another process holds the write lock until the block ends, or calls what it was given."""
    command = [sys.executable, "-I", "-S", "-c", _HOLD_THE_WRITE_LOCK, str(db_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == b"locked\n"

        def let_go() -> None:
            process.communicate()

        try:
            yield let_go
        finally:
            if process.poll() is None:
                let_go()
