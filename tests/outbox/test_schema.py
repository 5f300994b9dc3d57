"""What the database itself enforces, also against SQL that does not come from the store (Section 1)."""

import sqlite3
from datetime import UTC, datetime
from pathlib import Path

import pytest

from outbox.database import SQLiteStore
from outbox.models import LEGAL_STATUS_CHANGES, EventStatus
from tests.outbox.support import ORDER, add_event, rows

ARTICLE_INSERT = """
    INSERT INTO outbox (id, event_type, payload_json, idempotency_key, status, retry_count, last_error,
                        created_at, updated_at)
    VALUES (?, 'order.created', '{"order_id":"1"}', ?, ?, 0, NULL, ?, ?)
"""
NOW = datetime(2026, 1, 1, tzinfo=UTC).isoformat()

PAIRS = [(old, new) for old in EventStatus for new in EventStatus]
LEGAL = [
    ("PENDING", "PROCESSING"),
    ("PROCESSING", "PENDING"),
    ("PROCESSING", "PUBLISHED"),
    ("PROCESSING", "DEAD_LETTER"),
    ("PROCESSING", "PROCESSING"),
    ("DEAD_LETTER", "PENDING"),
]


def insert(db_path: Path, event_id: str, status: str = "PENDING") -> None:
    rows(db_path, ARTICLE_INSERT, event_id, f"key-of-{event_id}", status, NOW, NOW)


def test_the_transition_table_is_the_articles() -> None:
    assert set(LEGAL_STATUS_CHANGES) == set(LEGAL)


@pytest.mark.parametrize(("old", "new"), PAIRS, ids=[f"{old}->{new}" for old, new in PAIRS])
async def test_the_database_allows_legal_status_changes_and_refuses_all_others(
    store: SQLiteStore, db_path: Path, old: EventStatus, new: EventStatus
) -> None:
    insert(db_path, "1", status=old)
    insert(db_path, "2", status=old)
    change = "UPDATE outbox SET status = ? WHERE id = '1'"

    if (old, new) in LEGAL:
        rows(db_path, change, new)
        assert rows(db_path, "SELECT id, status FROM outbox ORDER BY id") == [("1", new), ("2", old)]
    else:
        with pytest.raises(sqlite3.IntegrityError, match="illegal outbox status change"):
            rows(db_path, change, new)
        assert rows(db_path, "SELECT status FROM outbox") == [(old,), (old,)]


@pytest.mark.parametrize("status", ["", "pending", "DONE", None])
async def test_there_is_no_fifth_status(store: SQLiteStore, db_path: Path, status: str | None) -> None:
    with pytest.raises(sqlite3.IntegrityError):
        rows(db_path, ARTICLE_INSERT, "1", "key", status, NOW, NOW)
    insert(db_path, "1")
    with pytest.raises(sqlite3.IntegrityError):
        rows(db_path, "UPDATE outbox SET status = ?", status)

    assert rows(db_path, "SELECT status FROM outbox") == [("PENDING",)]


async def test_a_row_inserted_with_only_the_articles_columns_is_delivered(store: SQLiteStore, db_path: Path) -> None:
    insert(db_path, "event-1")
    insert(db_path, "event-2")

    first, second = await store.claim_batch(10, 30.0)

    assert [first.id, second.id] == ["event-1", "event-2"]
    assert first.aggregate_id != second.aggregate_id  # neither waits for the other
    assert (first.payload_json, first.retry_count, first.last_error) == ('{"order_id":"1"}', 0, None)
    assert await store.mark_event_published(first)
    await store.record_event_failure_or_quarantine(second, "HTTP 400", 3, None)
    assert [dead_letter.original_event_id for dead_letter in await store.list_dead_letters()] == ["event-2"]


async def test_status_and_retry_count_have_defaults(store: SQLiteStore, db_path: Path) -> None:
    rows(
        db_path,
        "INSERT INTO outbox (id, event_type, payload_json, idempotency_key, created_at, updated_at) "
        "VALUES ('1', 'test.happened', '{}', 'key', ?, ?)",
        NOW,
        NOW,
    )

    assert rows(db_path, "SELECT status, retry_count, last_error FROM outbox") == [("PENDING", 0, None)]


@pytest.mark.parametrize(
    "column", ["id", "event_type", "payload_json", "idempotency_key", "status", "created_at", "updated_at"]
)
async def test_no_column_that_a_delivery_needs_may_be_missing(store: SQLiteStore, db_path: Path, column: str) -> None:
    insert(db_path, "1")
    with pytest.raises(sqlite3.IntegrityError, match=rf"NOT NULL constraint failed: outbox\.{column}"):
        rows(db_path, f"UPDATE outbox SET {column} = NULL")


async def test_id_and_idempotency_key_are_unique(store: SQLiteStore, db_path: Path) -> None:
    insert(db_path, "1")
    with pytest.raises(sqlite3.IntegrityError, match=r"outbox\.id"):
        rows(db_path, ARTICLE_INSERT, "1", "another key", "PENDING", NOW, NOW)
    with pytest.raises(sqlite3.IntegrityError, match=r"outbox\.idempotency_key"):
        rows(db_path, ARTICLE_INSERT, "2", "key-of-1", "PENDING", NOW, NOW)


async def test_an_aggregate_cannot_have_two_heads(store: SQLiteStore, db_path: Path) -> None:
    await add_event(store, "a", number=1)
    second = await add_event(store, "a", number=2)

    with pytest.raises(sqlite3.IntegrityError, match=r"UNIQUE constraint failed: outbox\.aggregate_id"):
        rows(db_path, "UPDATE outbox SET is_head = 1 WHERE id = ?", second.id)


async def test_a_dead_letter_needs_its_event_and_an_event_has_one_at_most(store: SQLiteStore) -> None:
    event = await add_event(store)
    dead_letter = "INSERT INTO dead_letter_queue VALUES (?, ?, '{}', 'HTTP 400', '')"

    async with store.transaction() as conn:
        with pytest.raises(sqlite3.IntegrityError, match="FOREIGN KEY"):
            await conn.execute(dead_letter, ("1", "nobody"))
        await conn.execute(dead_letter, ("1", event.id))
        with pytest.raises(sqlite3.IntegrityError, match=r"UNIQUE constraint failed: dead_letter_queue\.original"):
            await conn.execute(dead_letter, ("2", event.id))
        with pytest.raises(sqlite3.IntegrityError, match="FOREIGN KEY"):
            await conn.execute("DELETE FROM outbox")


async def test_a_transaction_of_the_callers_own_reads_rows_by_name(store: SQLiteStore) -> None:
    await store.create_order_with_outbox_event(ORDER)
    async with store.transaction() as conn:
        [row] = await conn.execute_fetchall("SELECT * FROM orders")

    assert row["customer_email"] == "ada@example.com"


async def test_opening_a_file_again_changes_nothing_in_it(store: SQLiteStore, db_path: Path) -> None:
    event = await add_event(store)
    before = rows(db_path, "SELECT * FROM sqlite_schema ORDER BY name")
    version = rows(db_path, "PRAGMA schema_version")

    async with SQLiteStore(db_path) as other:
        assert [claimed.id for claimed in await other.claim_batch(1, 30.0)] == [event.id]

    assert rows(db_path, "SELECT * FROM sqlite_schema ORDER BY name") == before
    assert rows(db_path, "PRAGMA schema_version") == version
