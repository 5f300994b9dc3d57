"""One SQLite file, one thread: how the operations of many coroutines reach the database.

An operation is a plain function of a `sqlite3.Connection`. It goes to the database thread as a whole, one hop there and
back, and cannot be interrupted on the way. Operations that wait at the same time share one commit. A transaction of the
caller's own has the database to itself for as long as its block lasts, on a second connection: `aiosqlite`, one hop per
statement.

Article: Section 3 (why SQLite with write-ahead logging).
"""

import asyncio
import logging
import os
import sqlite3
import time
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import aiosqlite

from outbox.cancellation import ended, run_to_end

logger = logging.getLogger(__name__)

T = TypeVar("T")
Operation = Callable[[sqlite3.Connection], T]


@dataclass(frozen=True, slots=True)
class Statement:
    """The operation that is a single statement: it returns the rows, and SQLite alone makes it all or nothing."""

    sql: str
    values: Mapping[str, Any]

    def __call__(self, connection: sqlite3.Connection) -> list[sqlite3.Row]:
        return connection.execute(self.sql, self.values).fetchall()


BUSY_TIMEOUT_SECONDS = 5.0
OPERATIONS_PER_COMMIT = 500
WAL_SIZE_LIMIT = 16 * 2**20
WAL_CHECKPOINT_PATIENCE_SECONDS = 0.1
WAL_CHECKPOINT_PAUSE_SECONDS = 1.0


# --- Every connection ----------------------------------------------------------------------------------


def _busy_timeout(seconds: float) -> str:
    return f"PRAGMA busy_timeout={int(seconds * 1000)}"


def _pragmas(synchronous: str) -> tuple[str, ...]:
    return (
        # First of all: the switch to WAL waits for a lock too, and fails at once if this comes after it.
        _busy_timeout(BUSY_TIMEOUT_SECONDS),
        "PRAGMA journal_mode=WAL",
        "PRAGMA foreign_keys=ON",
        f"PRAGMA synchronous={synchronous}",
        f"PRAGMA journal_size_limit={WAL_SIZE_LIMIT}",
    )


def _connect(path: Path, synchronous: str) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        connection.row_factory = sqlite3.Row
        # A row with broken UTF-8 must not make the whole fetch fail: it is found when it is decoded, and it alone.
        connection.text_factory = partial(str, encoding="utf-8", errors="surrogateescape")
        for pragma in _pragmas(synchronous):
            connection.execute(pragma).fetchall()
        journal_mode = connection.execute("PRAGMA journal_mode").fetchone()[0]
        if journal_mode != "wal":
            raise sqlite3.OperationalError(f"write-ahead logging is not possible here (journal_mode={journal_mode})")
    except BaseException:
        connection.close()
        raise
    return connection


async def configure_connection(conn: aiosqlite.Connection, synchronous: str = "NORMAL") -> None:
    """Set rows by name, WAL, foreign keys, the busy timeout and `synchronous` on a connection (Section 3)."""
    conn.row_factory = sqlite3.Row
    for pragma in _pragmas(synchronous):
        await conn.execute_fetchall(pragma)


class _TransactionConnection(sqlite3.Connection):
    """Closes, where a transaction ends, the cursors that were left open in it: each holds on to the snapshot that it
    reads, and BEGIN IMMEDIATE on an old snapshot fails at once with "database is locked"."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._cursors: weakref.WeakSet[sqlite3.Cursor] = weakref.WeakSet()

    def cursor(self, factory: Any = sqlite3.Cursor) -> Any:
        cursor = super().cursor(factory)
        self._cursors.add(cursor)
        return cursor

    def execute(self, *args: Any) -> sqlite3.Cursor:  # sqlite3's own makes its cursor without calling cursor()
        return cast(sqlite3.Cursor, self.cursor().execute(*args))

    def commit(self) -> None:
        self._close_cursors()
        super().commit()

    def rollback(self) -> None:
        self._close_cursors()
        super().rollback()

    def _close_cursors(self) -> None:
        for cursor in list(self._cursors):
            cursor.close()


# --- The thread ----------------------------------------------------------------------------------------


class _Turn(Generic[T]):
    """One wait for the database: for an operation, or for a transaction of the caller's own."""

    __slots__ = ("begun", "error", "future", "operation", "result", "writes")

    def __init__(self, operation: Operation[T], writes: bool, loop: asyncio.AbstractEventLoop) -> None:
        self.operation = operation
        self.writes = writes
        self.future: asyncio.Future[None] = loop.create_future()
        self.begun = False
        self.result: T | None = None
        self.error: BaseException | None = None

    def outcome(self) -> T:
        if self.error is not None:
            raise self.error
        return cast(T, self.result)


class DatabaseThread:
    """The connections to one SQLite file, the thread of the first, and the queue of those who wait for them."""

    def __init__(self, path: Path, synchronous: str) -> None:
        self._path = path
        self._synchronous = synchronous
        self._resources = AsyncExitStack()
        self._closed = True
        self._queue: deque[_Turn[Any]] = deque()
        self._transaction_task: asyncio.Task[Any] | None = None
        self._wal_tried_at = 0.0
        self._wal_held_back = False

    async def open(self, prepare: Operation[None]) -> None:
        """Connect, and run `prepare` as the first operation.

        Here and later, an error of the database is the `sqlite3.Error` that SQLite raised, with the name of the file in
        its message.
        """
        if not self._closed:
            raise RuntimeError(f"the store of {self._path} is open already")
        try:
            with self._errors_name_the_file():
                await run_to_end(self._connect())
            self._closed = False
            try:
                # A file that is ready is only read: it opens while another process holds the write lock.
                await self.run(prepare, writes=False)
            except sqlite3.OperationalError:
                await self.run(prepare)
        except BaseException:
            await self.close()
            raise

    async def _connect(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._busy = False
        self._executor = self._resources.enter_context(ThreadPoolExecutor(1, thread_name_prefix="outbox-database"))
        self._connection = await self._resources.enter_async_context(self._connection_of_the_thread())
        self._transaction_connection = await self._resources.enter_async_context(
            aiosqlite.connect(self._path, isolation_level=None, factory=_TransactionConnection)
        )
        await configure_connection(self._transaction_connection, self._synchronous)

    @asynccontextmanager
    async def _connection_of_the_thread(self) -> AsyncGenerator[sqlite3.Connection, None]:
        connecting = self._hop(partial(_connect, self._path, self._synchronous))
        try:
            # The end of asyncio.run() cancels every task, also one that run_to_end() waits for.
            await ended(connecting)
            yield connecting.result()
        finally:
            if connecting.exception() is None:
                await self._hop(connecting.result().close)

    async def close(self) -> None:
        """Let those who wait finish, refuse newcomers, and disconnect."""
        try:
            if not self._closed:
                last = self._join_queue(_own_transaction)
                self._closed = True
                await ended(last.future)
        finally:
            await run_to_end(self._resources.aclose())

    # --- operations: one hop, one commit for all who wait ---

    async def run(self, operation: Operation[T], *, writes: bool = True) -> T:
        """Run `operation` in the database thread, inside a transaction, and return its result.

        Cancelled while it waits, it never begins; cancelled later, it is carried out all the same, and
        `CancelledError` is raised when it has ended. An operation may run twice: where a shared commit fails, each of
        those who shared it is tried alone.
        """
        turn = self._join_queue(operation, writes)
        try:
            await asyncio.shield(turn.future)
        except asyncio.CancelledError:
            if not turn.begun:
                turn.future.cancel()
            await ended(turn.future)
            raise
        return turn.outcome()

    async def run_uncancelled(self, operation: Operation[T]) -> T:
        """As `run`, but once called it is carried out whatever happens; a cancellation is raised afterwards."""
        turn = self._join_queue(operation)
        await ended(turn.future)
        return turn.outcome()

    # --- a transaction of the caller's own: the database to itself, a hop per statement ---

    @asynccontextmanager
    async def transaction(self) -> AsyncGenerator[aiosqlite.Connection, None]:
        """Give the block a connection inside BEGIN IMMEDIATE; commit at its end, roll back if it raises anything."""
        turn = self._join_queue(_own_transaction)
        try:
            await turn.future
            self._transaction_task = asyncio.current_task()
            connection = self._transaction_connection
            try:
                with self._errors_name_the_file():
                    await run_to_end(_begin(connection))
                yield connection
                if not connection.in_transaction:
                    raise RuntimeError(
                        "the transaction was ended inside its block: leave COMMIT and ROLLBACK to the block's end"
                    )
                with self._errors_name_the_file():
                    await run_to_end(connection.commit())
            finally:
                # Whatever was raised: CancelledError is no Exception, and a rollback under `except Exception` would
                # leave the transaction open and the file locked. After the commit there is nothing to roll back.
                await run_to_end(connection.rollback())
        finally:
            self._transaction_task = None
            if turn.begun:
                self._end_turn()
                if self._wal_size() > WAL_SIZE_LIMIT and not self._closed:
                    self._join_queue(_nothing)

    # --- the queue ---

    def _join_queue(self, operation: Operation[T], writes: bool = True) -> _Turn[T]:
        if self._closed:
            raise RuntimeError(f"the store of {self._path} is not open")
        if self._transaction_task is not None and self._transaction_task is asyncio.current_task():
            raise RuntimeError(
                "a store operation inside transaction() would wait for its own end: "
                "use the connection and add_event, or call it after the block"
            )
        turn = _Turn(operation, writes, self._loop)
        self._queue.append(turn)
        # Not at once: those who are about to ask in this round of the event loop share the commit.
        self._loop.call_soon(self._next_turn)
        return turn

    def _next_turn(self) -> None:
        """Hand the database to whoever waits longest: one transaction, or all the operations in front of the next."""
        batch: list[_Turn[Any]] = []
        while self._queue and not self._busy and len(batch) < OPERATIONS_PER_COMMIT:
            turn = self._queue[0]
            if turn.future.cancelled():
                self._queue.popleft()
            elif turn.operation is not _own_transaction:
                batch.append(self._queue.popleft())
                turn.begun = True
            elif not batch:
                self._queue.popleft()
                turn.begun = self._busy = True
                turn.future.set_result(None)
            else:
                break
        if batch:
            self._busy = True
            self._hop(partial(self._carry_out, batch)).add_done_callback(partial(self._hop_ended, batch))

    def _hop_ended(self, batch: list[_Turn[Any]], hop: asyncio.Future[None]) -> None:
        for turn in batch:
            turn.future.set_result(None)
        self._end_turn()
        hop.result()

    def _end_turn(self) -> None:
        self._busy = False
        self._loop.call_soon(self._next_turn)

    def _hop(self, function: Callable[[], T]) -> asyncio.Future[T]:
        return self._loop.run_in_executor(self._executor, function)

    # --- in the database thread ---

    def _carry_out(self, turns: list[_Turn[Any]]) -> None:
        reads = [turn for turn in turns if not turn.writes]
        writes = [turn for turn in turns if turn.writes]
        if reads:
            self._commit_together(reads, "BEGIN")
        if writes:
            self._commit_together(writes, "BEGIN IMMEDIATE")
            self._bound_the_wal()

    def _commit_together(self, turns: list[_Turn[Any]], begin: str) -> None:
        """Run the operations in one transaction, so that one's failure is its own."""
        connection = self._connection
        try:
            connection.execute(begin)
        except sqlite3.Error as error:
            for turn in turns:
                turn.error = self._naming_the_file(error)
            return
        try:
            for turn in turns:
                self._attempt(turn)
            connection.execute("COMMIT")
        except sqlite3.Error as error:
            # The disk is full, say, or one operation rolled back more than its own part.
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            if len(turns) == 1:
                turns[0].error = turns[0].error or self._naming_the_file(error)
            else:
                for turn in turns:
                    self._commit_together([turn], begin)

    def _attempt(self, turn: _Turn[Any]) -> None:
        in_savepoint = not isinstance(turn.operation, Statement)
        if in_savepoint:
            self._connection.execute("SAVEPOINT operation")
        try:
            turn.result, turn.error = turn.operation(self._connection), None
        except BaseException as error:  # whatever it is, it belongs to the caller
            turn.error = self._naming_the_file(error) if isinstance(error, sqlite3.Error) else error
            if not self._connection.in_transaction:
                # It took the whole transaction with it, as a full disk does: going on, the next would commit alone.
                raise sqlite3.OperationalError("an operation rolled back the whole transaction") from error
            if in_savepoint:
                self._connection.execute("ROLLBACK TO operation")
        if in_savepoint:
            self._connection.execute("RELEASE operation")

    def _bound_the_wal(self) -> None:
        """Empty the WAL file where SQLite could not: each of its own checkpoints gives up at the first reader in its
        way, so readers that overlap without a gap would let the file grow for ever. This one waits for them a moment.
        """
        now = time.monotonic()
        if self._wal_size() <= WAL_SIZE_LIMIT or now - self._wal_tried_at < WAL_CHECKPOINT_PAUSE_SECONDS:
            return
        self._wal_tried_at = now
        try:
            self._connection.execute(_busy_timeout(WAL_CHECKPOINT_PATIENCE_SECONDS)).fetchall()
            held_back = bool(self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0])
        except sqlite3.Error:
            held_back = True
        finally:
            self._connection.execute(_busy_timeout(BUSY_TIMEOUT_SECONDS)).fetchall()
        if held_back and not self._wal_held_back:
            logger.warning(
                "The WAL file cannot be emptied: a reader holds an old snapshot open.",
                extra={"db_path": str(self._path), "wal_bytes": self._wal_size()},
            )
        self._wal_held_back = held_back

    def _wal_size(self) -> int:
        try:
            return os.stat(f"{self._path}-wal").st_size
        except OSError:
            return 0

    @contextmanager
    def _errors_name_the_file(self) -> Generator[None, None, None]:
        try:
            yield
        except sqlite3.Error as error:
            raise self._naming_the_file(error) from error

    def _naming_the_file(self, error: sqlite3.Error) -> sqlite3.Error:
        named = type(error)(f"{self._path}: {error}")
        named.__cause__ = error
        return named


async def _begin(connection: aiosqlite.Connection) -> None:
    await connection.execute("BEGIN IMMEDIATE")


def _own_transaction(connection: sqlite3.Connection) -> None:
    """Stands in the queue for a transaction of the caller's own, and is not run."""


def _nothing(connection: sqlite3.Connection) -> None:
    """An operation that changes nothing: it has the WAL file looked at."""
