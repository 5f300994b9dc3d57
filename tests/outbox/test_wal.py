"""The write-ahead log does not grow without bound: not by traffic, not by readers (Section 3)."""

import asyncio
import sqlite3
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import aiosqlite
import pytest

from outbox.database import SQLiteStore
from outbox.models import EventStatus
from tests.outbox.support import ORDER, add_event, locked_by_another_process, rows, write_lock_is_free

LIMIT = 200_000
LARGE_ORDER = ORDER.model_copy(update={"customer_email": "x" * 20_000 + "@example.com"})


@pytest.fixture
def small_wal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A day of traffic in small: 200 kB in place of 16 MiB, and no pause between two looks."""
    monkeypatch.setattr("outbox.connection.WAL_SIZE_LIMIT", LIMIT)
    monkeypatch.setattr("outbox.connection.WAL_CHECKPOINT_PAUSE_SECONDS", 0.0)


pytestmark = pytest.mark.usefixtures("small_wal")


def wal_size(db_path: Path) -> int:
    return Path(f"{db_path}-wal").stat().st_size


@contextmanager
def reader(db_path: Path) -> Iterator[sqlite3.Connection]:
    """Holds a snapshot for as long as the block lasts."""
    with closing(sqlite3.connect(db_path, isolation_level=None, check_same_thread=False)) as connection:
        connection.execute("BEGIN")
        connection.execute("SELECT count(*) FROM outbox").fetchall()
        yield connection


async def write_one(store: SQLiteStore) -> None:
    """An order and its event, about 50 kB of log."""
    await store.create_order_with_outbox_event(LARGE_ORDER)


async def write_one_in_a_transaction(store: SQLiteStore) -> None:
    async with store.transaction() as conn:
        await conn.execute("INSERT INTO orders VALUES (hex(randomblob(8)), hex(randomblob(20000)), '1', 'CREATED', '')")


@pytest.mark.parametrize("write", [write_one, write_one_in_a_transaction])
async def test_a_day_of_traffic_leaves_a_small_log(
    store: SQLiteStore, db_path: Path, write: Callable[[SQLiteStore], Awaitable[None]]
) -> None:
    largest = 0
    for _ in range(200):
        await write(store)
        await store.stats()  # the look at the log has been when this returns
        largest = max(largest, wal_size(db_path))

    assert rows(db_path, "SELECT count(*) FROM orders") == [(200,)]
    assert largest < 2 * LIMIT


async def test_a_log_that_a_reader_made_grow_shrinks_when_the_reader_ends(
    store: SQLiteStore, db_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outbox.connection.WAL_CHECKPOINT_PATIENCE_SECONDS", 0.001)
    await add_event(store)
    with reader(db_path):
        for _ in range(40):
            await write_one(store)
        assert wal_size(db_path) > 3 * LIMIT

    await write_one(store)

    assert wal_size(db_path) <= LIMIT
    # One line for the whole time, not one for each commit.
    [record] = [record for record in caplog.records if "WAL" in record.message]
    assert record.levelname == "WARNING"
    assert vars(record)["db_path"] == str(db_path)


async def test_each_time_that_a_reader_holds_the_log_back_is_logged_once(
    store: SQLiteStore, db_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outbox.connection.WAL_CHECKPOINT_PATIENCE_SECONDS", 0.001)
    for _ in range(2):
        await write_one(store)
        with reader(db_path):
            for _ in range(20):
                await write_one(store)
        await write_one(store)

    assert len([record for record in caplog.records if "WAL" in record.message]) == 2


async def test_a_held_back_look_at_the_log_leaves_the_patience_for_locks_as_it_was(
    store: SQLiteStore, db_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outbox.connection.WAL_CHECKPOINT_PATIENCE_SECONDS", 0.001)
    await add_event(store)
    with reader(db_path):
        for _ in range(10):
            await write_one(store)
    with locked_by_another_process(db_path) as let_go:
        asyncio.get_running_loop().call_later(0.05, let_go)
        await write_one(store)

    assert rows(db_path, "SELECT count(*) FROM orders") == [(11,)]


async def test_readers_that_overlap_without_a_gap_do_not_let_the_log_grow(store: SQLiteStore, db_path: Path) -> None:
    await add_event(store)
    stop = threading.Event()
    overlaps = 0

    def read_without_a_gap() -> None:
        """Opens the next reader before it ends the last one, again and again."""
        nonlocal overlaps
        first = reader(db_path)
        first.__enter__()
        while not stop.wait(0.002):
            second = reader(db_path)
            second.__enter__()
            first.__exit__(None, None, None)
            first = second
            overlaps += 1
        first.__exit__(None, None, None)

    reading = asyncio.create_task(asyncio.to_thread(read_without_a_gap))
    largest = 0
    try:
        for _ in range(150):
            await write_one(store)
            largest = max(largest, wal_size(db_path))
    finally:
        stop.set()
        await reading

    assert overlaps > 10
    assert largest < 5 * LIMIT  # 150 orders are 40 limits


async def test_a_cursor_left_open_in_a_transaction_holds_no_snapshot(store: SQLiteStore, db_path: Path) -> None:
    for number in range(200):
        await add_event(store, f"aggregate-{number}")
    async with store.transaction() as conn:
        by_execute = await conn.execute("SELECT * FROM outbox")
        await by_execute.fetchone()
        by_cursor = await conn.cursor()
        await by_cursor.execute("SELECT * FROM outbox")
        await by_cursor.fetchone()
    # What another connection commits now would be behind the snapshot, and the next BEGIN IMMEDIATE would fail.
    rows(db_path, "UPDATE outbox SET updated_at = 'later'")

    await add_event(store, "after")

    with pytest.raises(sqlite3.ProgrammingError):
        await by_execute.fetchone()
    assert write_lock_is_free(db_path)


async def test_a_cursor_left_open_in_a_transaction_that_fails_holds_no_snapshot(
    store: SQLiteStore, db_path: Path
) -> None:
    for number in range(200):
        await add_event(store, f"aggregate-{number}")

    async def leave_a_cursor_open() -> None:
        async with store.transaction() as conn:
            left_open.append(await conn.execute("SELECT * FROM outbox"))
            await left_open[0].fetchone()
            raise ZeroDivisionError

    left_open: list[aiosqlite.Cursor] = []
    with pytest.raises(ZeroDivisionError):
        await leave_a_cursor_open()
    rows(db_path, "UPDATE outbox SET updated_at = 'later'")

    await add_event(store, "after")


async def test_a_transaction_that_ends_with_a_large_log_while_the_store_closes_stands(db_path: Path) -> None:
    inside, go_on = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        async with store.transaction() as conn:
            inside.set()
            await go_on.wait()
            await conn.execute(f"INSERT INTO orders VALUES ('1', '{'x' * 3 * LIMIT}', '1', 'CREATED', '')")

    async with SQLiteStore(db_path) as store:
        transaction = asyncio.create_task(work())
        await inside.wait()
        asyncio.get_running_loop().call_soon(go_on.set)

    await transaction
    assert rows(db_path, "SELECT id FROM orders") == [("1",)]


async def test_closing_leaves_no_log_behind(db_path: Path) -> None:
    async with SQLiteStore(db_path) as store:
        await write_one(store)
        assert (await store.stats()).counts[EventStatus.PENDING] == 1

    assert not Path(f"{db_path}-wal").exists()
