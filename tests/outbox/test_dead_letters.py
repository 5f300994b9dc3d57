"""Quarantine and replay are one transaction each; listing goes by pages, purging by batches (Section 4.3, 7)."""

import asyncio
import sqlite3
from datetime import timedelta
from pathlib import Path

import pytest

from outbox.database import PURGE_BATCH, SQLiteStore
from outbox.models import DeadLetterRecord, DuplicateEventError, EventStatus, OutboxEvent
from tests.outbox.conftest import FakeClock
from tests.outbox.support import ORDER, add_event, rows, write_lock_is_free


async def quarantine(store: SQLiteStore, aggregate_id: str = "a", **payload: object) -> DeadLetterRecord:
    await add_event(store, aggregate_id, **payload)
    [event] = await store.claim_batch(1, 30.0)
    result = await store.record_event_failure_or_quarantine(event, "HTTP 400: no", 3, None)
    assert result is not None
    status, _, dead_letter = result
    assert status == EventStatus.DEAD_LETTER
    assert dead_letter is not None
    return dead_letter


async def test_the_dead_letter_says_what_could_not_be_delivered_and_why(
    store: SQLiteStore, db_path: Path, clock: FakeClock
) -> None:
    event = await add_event(store, text="x" * 100_000)
    [claimed] = await store.claim_batch(1, 30.0)
    clock.advance(1.0)

    result = await store.record_event_failure_or_quarantine(claimed, "HTTP 500: no", 1, 60.0)

    assert result is not None
    status, retry_count, dead_letter = result
    assert (status, retry_count) == (EventStatus.DEAD_LETTER, 1)
    assert dead_letter is not None
    assert dead_letter.original_event_id == event.id
    assert dead_letter.payload_json == event.payload_json
    assert dead_letter.failure_reason == "HTTP 500: no"
    assert dead_letter.quarantined_at == clock.now
    assert await store.list_dead_letters() == [dead_letter]
    assert rows(db_path, "SELECT status, retry_count, last_error, lease_token FROM outbox") == [
        ("DEAD_LETTER", 1, "HTTP 500: no", None)
    ]


@pytest.mark.parametrize(("attempts", "status"), [(2, EventStatus.DEAD_LETTER), (3, EventStatus.PENDING)])
async def test_the_last_attempt_that_fails_quarantines(store: SQLiteStore, attempts: int, status: EventStatus) -> None:
    await add_event(store)
    for _ in range(2):
        [event] = await store.claim_batch(1, 30.0)
        result = await store.record_event_failure_or_quarantine(event, "HTTP 500", attempts, 0.0)

    assert result is not None
    assert result[:2] == (status, 2)


async def test_an_event_claimed_with_its_attempts_used_up_is_quarantined_without_another_count(
    store: SQLiteStore, clock: FakeClock
) -> None:
    await add_event(store)
    for _ in range(4):
        [event] = await store.claim_batch(1, 30.0)
        clock.advance(30.0)

    result = await store.record_event_failure_or_quarantine(event, "not sent", 3, 1.0)

    assert result is not None
    assert result[:2] == (EventStatus.DEAD_LETTER, 3)


@pytest.mark.parametrize("fault", ["ABORT", "ROLLBACK"])
async def test_quarantine_is_both_the_status_and_the_dead_letter_or_neither(
    store: SQLiteStore, db_path: Path, fault: str
) -> None:
    rows(db_path, f"CREATE TRIGGER full BEFORE INSERT ON dead_letter_queue BEGIN SELECT RAISE({fault}, 'no room'); END")
    await add_event(store)
    [event] = await store.claim_batch(1, 30.0)

    with pytest.raises(sqlite3.IntegrityError, match="no room"):
        await store.record_event_failure_or_quarantine(event, "HTTP 400", 3, None)

    assert rows(db_path, "SELECT status, last_error FROM outbox") == [("PROCESSING", None)]
    assert write_lock_is_free(db_path)
    rows(db_path, "DROP TRIGGER full")
    assert await store.record_event_failure_or_quarantine(event, "HTTP 400", 3, None)


async def test_what_a_remote_side_says_is_stored_cut_and_as_valid_text(store: SQLiteStore, db_path: Path) -> None:
    await add_event(store)
    [event] = await store.claim_batch(1, 30.0)

    await store.record_event_failure_or_quarantine(event, "\udcff" + "é" * 100_000, 3, 0.0)

    [(error,)] = rows(db_path, "SELECT last_error FROM outbox")
    assert error == "?" + "é" * 4095


# --- replay ---


async def test_a_replay_starts_again_with_the_same_key_and_bytes(
    store: SQLiteStore, db_path: Path, clock: FakeClock
) -> None:
    dead_letter = await quarantine(store, number=1)
    [(key, payload)] = rows(db_path, "SELECT idempotency_key, payload_json FROM outbox")
    clock.advance(60.0)

    assert await store.replay_dead_letter(dead_letter.original_event_id) is True

    assert await store.list_dead_letters() == []
    [event] = await store.claim_batch(1, 30.0)
    assert (event.id, event.idempotency_key, event.payload_json) == (dead_letter.original_event_id, key, payload)
    assert event.retry_count == 0


async def test_replaying_twice_is_harmless(store: SQLiteStore) -> None:
    dead_letter = await quarantine(store)

    at_once = await asyncio.gather(*(store.replay_dead_letter(dead_letter.original_event_id) for _ in range(5)))
    [event] = await store.claim_batch(10, 30.0)
    while_it_is_under_way = await store.replay_dead_letter(dead_letter.original_event_id)
    await store.mark_event_published(event)
    afterwards = await store.replay_dead_letter(dead_letter.original_event_id)

    assert at_once == [True, False, False, False, False]
    assert (while_it_is_under_way, afterwards) == (False, False)
    assert await store.claim_batch(10, 30.0) == []


async def test_what_is_no_dead_letter_is_not_replayed(store: SQLiteStore, db_path: Path) -> None:
    event = await add_event(store)

    assert await store.replay_dead_letter(event.id) is False
    assert await store.replay_dead_letter("nobody") is False
    assert rows(db_path, "SELECT status FROM outbox") == [("PENDING",)]


async def test_a_replay_that_fails_leaves_the_dead_letter(store: SQLiteStore, db_path: Path) -> None:
    dead_letter = await quarantine(store)
    rows(
        db_path,
        "CREATE TRIGGER full BEFORE UPDATE ON outbox WHEN NEW.status = 'PENDING' "
        "BEGIN SELECT RAISE(ABORT, 'no room'); END",
    )

    with pytest.raises(sqlite3.IntegrityError, match="no room"):
        await store.replay_dead_letter(dead_letter.original_event_id)

    assert await store.list_dead_letters() == [dead_letter]
    assert rows(db_path, "SELECT status FROM outbox") == [("DEAD_LETTER",)]


async def test_a_replayed_event_can_be_quarantined_again(store: SQLiteStore) -> None:
    first = await quarantine(store)
    await store.replay_dead_letter(first.original_event_id)
    [event] = await store.claim_batch(1, 30.0)
    await store.record_event_failure_or_quarantine(event, "HTTP 410", 3, None)

    [second] = await store.list_dead_letters()

    assert second.original_event_id == first.original_event_id
    assert second.id != first.id
    assert second.failure_reason == "HTTP 410"


# --- listing and counting ---


async def test_dead_letters_are_listed_by_pages_oldest_first(store: SQLiteStore) -> None:
    dead_letters = [await quarantine(store, f"aggregate-{number}") for number in range(7)]

    pages = [page := await store.list_dead_letters(limit=3)]
    while page := await store.list_dead_letters(limit=3, after=page[-1].id):
        pages.append(page)

    assert [len(page) for page in pages] == [3, 3, 1]
    assert [dead_letter for page in pages for dead_letter in page] == dead_letters
    assert await store.list_dead_letters(limit=3, after=dead_letters[2].original_event_id) == pages[1]
    assert await store.list_dead_letters(limit=0) == []


async def test_a_page_after_what_is_no_dead_letter_is_refused(store: SQLiteStore) -> None:
    with pytest.raises(ValueError, match="after: there is no dead letter with the id 'nobody'"):
        await store.list_dead_letters(after="nobody")


async def test_a_negative_page_is_refused(store: SQLiteStore) -> None:
    with pytest.raises(ValueError, match="limit must not be negative, it is -1"):
        await store.list_dead_letters(limit=-1)


async def test_stats_count_each_state_and_tell_the_age_of_the_oldest_pending_event(
    store: SQLiteStore, clock: FakeClock
) -> None:
    await quarantine(store, "dead")
    await add_event(store, "published")
    [event] = await store.claim_batch(1, 30.0)
    await store.mark_event_published(event)
    await add_event(store, "leased")
    await store.claim_batch(1, 30.0)
    nothing_pending = await store.stats()
    await add_event(store, "pending", number=1)
    clock.advance(90.5)
    await add_event(store, "pending", number=2)

    stats = await store.stats()

    assert nothing_pending.oldest_pending_age_seconds is None
    assert stats.counts == {
        EventStatus.PENDING: 2,
        EventStatus.PROCESSING: 1,
        EventStatus.PUBLISHED: 1,
        EventStatus.DEAD_LETTER: 1,
    }
    assert stats.oldest_pending_age_seconds == 90.5


# --- purging ---


async def publish(store: SQLiteStore, aggregate_id: str) -> OutboxEvent:
    await add_event(store, aggregate_id)
    [event] = await store.claim_batch(1, 30.0)
    assert await store.mark_event_published(event)
    return event


async def test_a_purge_deletes_what_was_published_longer_ago_and_nothing_else(
    store: SQLiteStore, db_path: Path, clock: FakeClock
) -> None:
    await publish(store, "old")
    await quarantine(store, "dead")
    await add_event(store, "leased")
    await store.claim_batch(1, 30.0)
    await add_event(store, "pending")
    clock.advance(3600.0)
    await publish_now(store, "new")

    assert await store.purge_published(timedelta(hours=1)) == 0  # the old one is exactly an hour old
    clock.advance(0.000001)
    assert await store.purge_published(timedelta(hours=1)) == 1

    left = rows(db_path, "SELECT aggregate_id FROM outbox ORDER BY sequence")
    assert left == [("dead",), ("leased",), ("pending",), ("new",)]


async def publish_now(store: SQLiteStore, aggregate_id: str) -> None:
    await add_event(store, aggregate_id)
    for event in await store.claim_batch(10, 30.0):
        if event.aggregate_id == aggregate_id:
            await store.mark_event_published(event)
        else:
            await store.release(event, 0.0)


async def test_a_purged_key_is_forgotten_and_can_be_used_again(store: SQLiteStore, clock: FakeClock) -> None:
    first = await publish(store, "a")
    with pytest.raises(DuplicateEventError):
        await add_event(store, "a")

    clock.advance(1.0)
    await store.purge_published(timedelta(0))

    again = await add_event(store, "a")
    assert again.idempotency_key == first.idempotency_key
    assert again.sequence > first.sequence


async def test_a_purge_goes_in_batches_and_lets_others_in_between(
    store: SQLiteStore, db_path: Path, clock: FakeClock
) -> None:
    rows(
        db_path,
        f"""
        WITH RECURSIVE number (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM number WHERE n < {PURGE_BATCH * 2 + 1})
        INSERT INTO outbox (id, event_type, payload_json, idempotency_key, status, created_at, updated_at)
        SELECT n, 'test.happened', '{{}}', n, 'PUBLISHED', '2025', '2025' FROM number
        """,
    )
    left_when_another_came: list[int] = []

    def look() -> None:
        left_when_another_came.append(rows(db_path, "SELECT count(*) FROM outbox WHERE status = 'PUBLISHED'")[0][0])

    purge = asyncio.create_task(store.purge_published(timedelta(0)))
    while not purge.done():
        await store.create_order_with_outbox_event(ORDER, failure_injector=look)

    assert purge.result() == PURGE_BATCH * 2 + 1
    assert {1, PURGE_BATCH + 1} <= set(left_when_another_came)


async def test_a_purge_of_a_negative_age_is_refused_and_one_before_all_time_deletes_nothing(
    store: SQLiteStore, clock: FakeClock
) -> None:
    await publish(store, "a")

    with pytest.raises(ValueError, match="older_than must not be negative"):
        await store.purge_published(timedelta(seconds=-1))
    assert await store.purge_published(timedelta.max) == 0
    assert (await store.stats()).counts[EventStatus.PUBLISHED] == 1
