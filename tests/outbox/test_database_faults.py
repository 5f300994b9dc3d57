"""A database that fails says so, with its name, and loses nothing; a row that cannot be decoded is in nobody's way."""

import asyncio
import os
import re
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from outbox.config import AppConfig
from outbox.database import SQLiteStore
from outbox.dispatcher import CLAIM_FAULT, OutboxDispatcher
from outbox.mock_consumer import InMemoryIdempotencyStore
from outbox.models import EventStatus
from tests.outbox.conftest import FakeClock
from tests.outbox.support import (
    ORDER,
    add_event,
    assert_nothing_is_left_running,
    locked_by_another_process,
    orders_and_events,
    rows,
    wait_until,
    write_lock_is_free,
)


async def open_and_close(db_path: Path) -> None:
    async with SQLiteStore(db_path):
        pass


async def error_on_opening(db_path: Path) -> str:
    """The message; it names the file, once."""
    with pytest.raises(sqlite3.Error, match=re.escape(str(db_path))) as caught:
        await open_and_close(db_path)
    message = str(caught.value)
    assert message.count(str(db_path)) == 1
    assert asyncio.all_tasks() == {asyncio.current_task()}
    return message.removeprefix(f"{db_path}: ")


# --- a file that cannot be opened ---


async def test_a_folder_is_no_database(tmp_path: Path) -> None:
    assert await error_on_opening(tmp_path) == "unable to open database file"


async def test_a_parent_folder_that_is_missing_is_named(tmp_path: Path) -> None:
    assert await error_on_opening(tmp_path / "missing" / "outbox.db") == "unable to open database file"


async def test_a_file_that_is_no_database_is_left_as_it_is(db_path: Path) -> None:
    db_path.write_text("Dear diary, " * 1000)

    assert await error_on_opening(db_path) == "file is not a database"

    assert db_path.read_text() == "Dear diary, " * 1000


async def test_a_file_that_is_damaged_is_named(db_path: Path) -> None:
    await open_and_close(db_path)
    content = bytearray(db_path.read_bytes())
    content[100:4096] = b"\xff" * 3996
    db_path.write_bytes(content)

    assert await error_on_opening(db_path) == "database disk image is malformed"


_OPEN_AS_NOBODY = """
import asyncio, os, sys
from outbox.database import SQLiteStore
from outbox.models import OrderCreate

async def main(path):
    async with SQLiteStore(path) as store:
        await store.create_order_with_outbox_event(OrderCreate(customer_email="ada@example.com", amount="1"))

if os.getuid() == 0:
    asyncio.run(main(sys.argv[2]))  # loads every module: nobody may be unable to read where they are
    os.setgid(65534)
    os.setuid(65534)
try:
    asyncio.run(main(sys.argv[1]))
except Exception as error:
    print(f"{type(error).__name__}: {error}")
"""


@pytest.mark.parametrize(
    ("mode", "message"),
    [(0o000, "unable to open database file"), (0o444, "attempt to write a readonly database")],
    ids=["unreadable", "read-only"],
)
async def test_a_file_without_permission_is_named(mode: int, message: str) -> None:
    # Not tmp_path, whose parents only its owner can enter.
    with tempfile.TemporaryDirectory() as folder:
        db_path = Path(folder) / "outbox.db"
        await open_and_close(db_path)
        db_path.chmod(mode)
        os.chmod(folder, 0o777)  # noqa: S103

        command = [sys.executable, "-c", _OPEN_AS_NOBODY, str(db_path), str(Path(folder) / "rehearsal.db")]
        child = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)

    assert child.stdout == f"OperationalError: {db_path}: {message}\n"


@pytest.mark.parametrize(
    "table",
    [
        "TABLE outbox (id INTEGER PRIMARY KEY, subject, body)",
        "TABLE outbox (id, event_type, payload_json, idempotency_key, status, retry_count, last_error, created_at)",
        "TABLE dead_letter_queue (id, letter)",
        "VIEW outbox AS SELECT 1 AS id",
    ],
)
async def test_a_table_of_another_kind_is_named_and_nothing_is_added_beside_it(db_path: Path, table: str) -> None:
    rows(db_path, f"CREATE {table}")
    name = table.split()[1]
    before = rows(db_path, "SELECT * FROM sqlite_schema")

    message = await error_on_opening(db_path)

    assert message.startswith(f"the table {name} is of another kind: ")
    assert rows(db_path, "SELECT * FROM sqlite_schema") == before


async def test_orders_of_the_callers_own_kind_are_no_obstacle_to_events(db_path: Path) -> None:
    rows(db_path, "CREATE TABLE orders (number, customer)")
    async with SQLiteStore(db_path) as store:
        await add_event(store)
        with pytest.raises(sqlite3.OperationalError, match=rf"{db_path}: table orders has no column named"):
            await store.create_order_with_outbox_event(ORDER)

    assert orders_and_events(db_path) == (0, 1)


@pytest.mark.parametrize("db_path_is", ["", ":memory:"])
def test_a_database_in_memory_is_refused(db_path_is: str) -> None:
    with pytest.raises(ValueError, match="db_path must name a file"):
        SQLiteStore(db_path_is)


def test_an_unknown_synchronous_is_refused(db_path: Path) -> None:
    with pytest.raises(ValueError, match="synchronous must be NORMAL or FULL, not 'OFF'"):
        SQLiteStore(db_path, synchronous="OFF")  # type: ignore[arg-type]


_OPEN_A_NEW_FILE = """
import asyncio, sys
from outbox.database import SQLiteStore
from outbox.models import OrderCreate

async def main(path):
    sys.stdin.read(1)
    async with SQLiteStore(path) as store:
        await store.create_order_with_outbox_event(OrderCreate(customer_email="ada@example.com", amount="1"))

asyncio.run(main(sys.argv[1]))
"""


def test_processes_that_open_a_new_file_at_the_same_time_all_succeed(db_path: Path) -> None:
    command = [sys.executable, "-c", _OPEN_A_NEW_FILE, str(db_path)]
    children = [subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(6)]
    errors = [child.communicate("!", timeout=30)[1] for child in children]

    assert errors == [""] * 6
    assert orders_and_events(db_path) == (6, 6)


# --- a lock that is held for too long ---


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stores that are opened from here on wait 20 ms for a lock."""
    monkeypatch.setattr("outbox.connection.BUSY_TIMEOUT_SECONDS", 0.02)


@pytest.mark.usefixtures("impatient")
async def test_a_new_file_locked_for_too_long_cannot_be_opened(db_path: Path) -> None:
    rows(db_path, "PRAGMA journal_mode = WAL")
    with locked_by_another_process(db_path):
        assert await error_on_opening(db_path) == "database is locked"

    await open_and_close(db_path)


@pytest.mark.usefixtures("impatient")
async def test_a_file_that_is_ready_can_be_opened_and_read_while_it_is_locked(db_path: Path) -> None:
    await open_and_close(db_path)
    with locked_by_another_process(db_path):
        async with SQLiteStore(db_path) as store:
            assert (await store.stats()).counts[EventStatus.PENDING] == 0
            assert await store.list_dead_letters() == []


@pytest.mark.usefixtures("impatient")
async def test_each_operation_on_a_file_locked_for_too_long_names_it_and_changes_nothing(db_path: Path) -> None:
    async with SQLiteStore(db_path) as store:
        await add_event(store)
        [event] = await store.claim_batch(1, 30.0)
        before = rows(db_path, "SELECT * FROM outbox")
        with locked_by_another_process(db_path):
            errors = await asyncio.gather(
                store.create_order_with_outbox_event(ORDER),
                store.create_order_with_outbox_event(ORDER),
                add_event(store, number=2),
                store.claim_batch(1, 30.0),
                store.mark_event_published(event),
                store.release(event, 0.0),
                store.record_event_failure_or_quarantine(event, "HTTP 500", 3, 1.0),
                store.record_event_failure_or_quarantine(event, "HTTP 400", 3, None),
                store.replay_dead_letter(event.id),
                return_exceptions=True,
            )
            assert rows(db_path, "SELECT * FROM outbox") == before

        assert {type(error) for error in errors} == {sqlite3.OperationalError}
        assert {str(error) for error in errors} == {f"{db_path}: database is locked"}
        # The lock is gone, the fault is gone.
        assert await store.mark_event_published(event) is True
        await store.create_order_with_outbox_event(ORDER)
    assert_no_lock_and_no_orphan(db_path)


def assert_no_lock_and_no_orphan(db_path: Path) -> None:
    assert write_lock_is_free(db_path)
    assert rows(db_path, "SELECT count(*) FROM orders") == [(1,)]
    assert rows(db_path, "SELECT count(*) FROM outbox WHERE event_type = 'order.created'") == [(1,)]


async def test_a_lock_that_is_let_go_in_time_is_waited_for(store: SQLiteStore, db_path: Path) -> None:
    with locked_by_another_process(db_path) as let_go:
        order = asyncio.create_task(store.create_order_with_outbox_event(ORDER))
        asyncio.get_running_loop().call_later(0.05, let_go)
        await order

    assert_nothing_is_left_running(db_path)


@pytest.mark.usefixtures("impatient")
async def test_a_dispatcher_goes_on_once_the_lock_is_let_go(
    db_path: Path,
    config: AppConfig,
    idempotency_store: InMemoryIdempotencyStore,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with SQLiteStore(db_path) as store:
        await add_event(store)
        with locked_by_another_process(db_path) as let_go:
            async with OutboxDispatcher(config, store):
                await wait_until(lambda: CLAIM_FAULT in caplog.messages)
                let_go()
                await wait_until(lambda: idempotency_store.side_effects_count == 1)

    assert rows(db_path, "SELECT status, retry_count FROM outbox") == [("PUBLISHED", 0)]
    assert caplog.messages.count(CLAIM_FAULT) == 1


# --- a disk that is full ---


async def set_most_pages(store: SQLiteStore, pages: int | str) -> None:
    """As SQLite sees a full disk: no page can be added to the file."""

    def limit(connection: sqlite3.Connection) -> None:
        connection.execute(f"PRAGMA max_page_count = {pages}").fetchall()

    await store._database.run(limit)


async def test_a_full_disk_is_an_error_for_who_needs_room_and_for_nobody_else(
    store: SQLiteStore, db_path: Path
) -> None:
    await add_event(store)
    [event] = await store.claim_batch(1, 30.0)
    await set_most_pages(store, 1)  # SQLite makes it the present size
    large = ORDER.model_copy(update={"customer_email": "x" * 100_000 + "@example.com"})

    results = await asyncio.gather(
        store.create_order_with_outbox_event(large),
        store.mark_event_published(event),
        store.create_order_with_outbox_event(large),
        return_exceptions=True,
    )

    assert [str(result) for result in results[::2]] == [f"{db_path}: database or disk is full"] * 2
    assert results[1] is True
    assert orders_and_events(db_path) == (0, 1)
    await set_most_pages(store, 4294967294)
    await store.create_order_with_outbox_event(large)
    assert orders_and_events(db_path) == (1, 2)


_FILL_THE_DISK = """
import asyncio, resource, sqlite3, sys
from outbox.database import SQLiteStore
from outbox.models import OrderCreate

ORDER = OrderCreate(customer_email="ada@example.com", amount="1")

async def place_until_it_fails(store, acknowledged):
    while True:
        results = await asyncio.gather(
            *(store.create_order_with_outbox_event(ORDER) for _ in range(20)), return_exceptions=True
        )
        for result in results:
            if isinstance(result, BaseException):
                failures.append(result)
            else:
                acknowledged.append(result[0].id)
        if failures:
            return

async def main(path):
    async with SQLiteStore(path) as store:
        acknowledged = []
        resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, resource.RLIM_INFINITY))
        await place_until_it_fails(store, acknowledged)
        for _ in range(20):  # it stays full, and stays an error
            try:
                async with store.transaction() as conn:
                    await conn.execute("CREATE TABLE large AS SELECT randomblob(1000000)")
            except sqlite3.Error as error:
                failures.append(error)
            try:
                await store.stats()
                await store.create_order_with_outbox_event(ORDER)
            except sqlite3.Error as error:
                failures.append(error)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        for _ in range(20):
            order, _ = await store.create_order_with_outbox_event(ORDER)
            acknowledged.append(order.id)
        claimed = await store.claim_batch(10_000, 30.0)
        assert all([await store.mark_event_published(event) for event in claimed[:50]])
        print(len(acknowledged))
        print(len({order_id for order_id in acknowledged} - {event.aggregate_id for event in claimed}))

failures = []
asyncio.run(main(sys.argv[1]))
print(*sorted({f"{type(failure).__name__}: {failure}" for failure in failures}), sep="\\n")
"""


def test_a_disk_that_fills_up_loses_nothing_and_the_store_goes_on_when_there_is_room_again(db_path: Path) -> None:
    command = [sys.executable, "-c", _FILL_THE_DISK, str(db_path)]
    child = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=60, check=True)
    acknowledged, missing, *failures = child.stdout.splitlines()

    assert int(acknowledged) > 20
    assert missing == "0"
    assert failures
    assert all("disk" in failure for failure in failures)
    assert any(str(db_path) in failure for failure in failures)
    orders, events = orders_and_events(db_path)
    assert orders == events
    assert rows(db_path, "PRAGMA integrity_check") == [("ok",)]
    assert rows(db_path, "SELECT count(*) FROM outbox WHERE status = 'PUBLISHED'") == [(50,)]


# --- rows that cannot be decoded ---

_INSERT = """
    INSERT INTO outbox (id, event_type, aggregate_id, payload_json, idempotency_key, created_at, updated_at)
    VALUES ('broken', 'test.happened', 'broken', '{}', 'broken-key', '2026-01-01T00:00:00+00:00', '2026-01-01')
"""

BROKEN = {
    "event_type with a newline": "event_type = 'a' || char(10) || 'X-Injected: 1'",
    "event_type that is empty": "event_type = ''",
    "event_type too long for a header": f"event_type = '{'x' * 201}'",
    "aggregate_id with a space": "aggregate_id = 'a b'",
    "idempotency_key that is no header": "idempotency_key = char(0)",
    "id that is no header": "id = 'ü'",
    "payload in bad UTF-8": "payload_json = CAST(X'ff7b7d' AS TEXT)",
    "payload that is a blob": "payload_json = X'fffe'",
    "event_type in bad UTF-8": "event_type = CAST(X'61ff' AS TEXT)",
    "retry_count below zero": "retry_count = -1",
    "retry_count that is a fraction": "retry_count = 0.5",
    "retry_count beyond all numbers": "retry_count = 9e999",
    "retry_count beyond 64 bits": "retry_count = 1e19",
    "created_at that is rubbish": "created_at = 'yesterday'",
    "created_at without a time zone": "created_at = '2026-01-01 00:00:00'",
    "created_at that is a blob": "created_at = X'00ff'",
}


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN)
async def test_a_row_that_cannot_be_decoded_is_quarantined_and_the_others_are_delivered(
    store: SQLiteStore, db_path: Path, broken: str
) -> None:
    await add_event(store, "before")
    rows(db_path, _INSERT)
    rows(db_path, f"UPDATE outbox SET {broken} WHERE idempotency_key = 'broken-key'")
    [(sequence, event_id, payload)] = rows(
        db_path, "SELECT sequence, CAST(id AS BLOB), CAST(payload_json AS BLOB) FROM outbox WHERE sequence = 2"
    )
    await add_event(store, "after")
    await store.stats()

    events = await store.claim_batch(10, 30.0)

    assert [event.aggregate_id for event in events] == ["before", "after"]
    assert rows(db_path, "SELECT status, lease_token FROM outbox WHERE sequence = ?", sequence) == [
        ("DEAD_LETTER", None)
    ]
    assert rows(
        db_path, "SELECT CAST(original_event_id AS BLOB), CAST(payload_json AS BLOB) FROM dead_letter_queue"
    ) == [(event_id, payload)]
    [dead_letter] = await store.list_dead_letters()
    assert dead_letter.failure_reason == rows(db_path, "SELECT last_error FROM outbox WHERE sequence = 2")[0][0]
    assert broken.split()[0] in dead_letter.failure_reason
    assert await store.claim_batch(10, 30.0) == []


async def test_stats_pass_over_a_time_that_cannot_be_decoded(
    store: SQLiteStore, db_path: Path, clock: FakeClock
) -> None:
    rows(db_path, _INSERT)
    for rubbish in ("'yesterday'", "'2026-01-01 00:00:00'", "X'00ff'", "12"):
        rows(db_path, f"UPDATE outbox SET created_at = {rubbish}")
        assert (await store.stats()).oldest_pending_age_seconds is None

    await add_event(store)
    clock.advance(2.0)
    assert (await store.stats()).oldest_pending_age_seconds == 2.0


async def test_a_claim_full_of_broken_rows_is_no_end_of_the_work(store: SQLiteStore, db_path: Path) -> None:
    for number in range(5):
        rows(
            db_path,
            _INSERT.replace("'broken'", f"'broken-{number}'")
            .replace("broken-key", f"key-{number}")
            .replace("test.happened", "no header"),
        )
    event = await add_event(store)

    assert [claimed for claim in [await store.claim_batch(2, 30.0) for _ in range(2)] for claimed in claim] == []
    assert [claimed.id for claimed in await store.claim_batch(2, 30.0)] == [event.id]
    assert (await store.stats()).counts[EventStatus.DEAD_LETTER] == 5


async def test_a_broken_row_does_not_hold_its_aggregate_back(store: SQLiteStore, db_path: Path) -> None:
    rows(db_path, _INSERT)
    rows(db_path, "UPDATE outbox SET event_type = 'no header'")
    event = await add_event(store, "broken")

    assert await store.claim_batch(10, 30.0) == []
    assert [claimed.id for claimed in await store.claim_batch(10, 30.0)] == [event.id]


async def test_a_lease_with_an_absurd_count_is_taken_over_and_can_be_quarantined(
    store: SQLiteStore, db_path: Path, clock: FakeClock
) -> None:
    await add_event(store)
    await store.claim_batch(1, 30.0)
    rows(db_path, "UPDATE outbox SET retry_count = ?", 2**63 - 1)
    clock.advance(30.0)

    for event in await store.claim_batch(1, 30.0):
        await store.record_event_failure_or_quarantine(event, "not sent", 3, 1.0)

    assert rows(db_path, "SELECT status FROM outbox") == [("DEAD_LETTER",)]


async def test_a_quarantine_that_fails_gives_back_the_sound_events_of_its_claim(
    store: SQLiteStore, db_path: Path
) -> None:
    sound = await add_event(store, "sound")
    rows(db_path, _INSERT)
    rows(db_path, "UPDATE outbox SET event_type = 'no header' WHERE id = 'broken'")
    rows(db_path, "CREATE TRIGGER full BEFORE INSERT ON dead_letter_queue BEGIN SELECT RAISE(ABORT, 'no room'); END")

    with pytest.raises(sqlite3.IntegrityError, match="no room"):
        await store.claim_batch(10, 30.0)

    assert rows(db_path, "SELECT status, retry_count FROM outbox") == [("PENDING", 0), ("PENDING", 0)]
    rows(db_path, "DROP TRIGGER full")
    assert [event.id for event in await store.claim_batch(10, 30.0)] == [sound.id]
