"""A claim is a lease: fenced by a token, taken over when it expires, worth nothing to who lost it (Section 4.2)."""

import asyncio
import json
import math
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from outbox.database import SQLiteStore
from outbox.mock_consumer import InMemoryIdempotencyStore, create_app, serve
from outbox.models import EventStatus, OutboxEvent
from tests.outbox.conftest import FakeClock
from tests.outbox.support import ORDER, add_event, rows

LEASE_SECONDS = 30.0

Settle = Callable[[SQLiteStore, OutboxEvent], Awaitable[object]]
SETTLEMENTS: dict[str, Settle] = {
    "publish": lambda store, event: store.mark_event_published(event),
    "retry": lambda store, event: store.record_event_failure_or_quarantine(event, "HTTP 500", 9, 1.0),
    "quarantine": lambda store, event: store.record_event_failure_or_quarantine(event, "HTTP 400", 9, None),
    "release": lambda store, event: store.release(event, 0.0),
}
each_settlement = pytest.mark.parametrize("settle", SETTLEMENTS.values(), ids=SETTLEMENTS)


def whole_row(db_path: Path) -> list[tuple[Any, ...]]:
    return rows(db_path, "SELECT * FROM outbox") + rows(db_path, "SELECT * FROM dead_letter_queue")


async def test_a_claim_leases_what_is_due_and_each_claim_has_its_own_token(
    store: SQLiteStore, db_path: Path, clock: FakeClock
) -> None:
    added = [await add_event(store, aggregate_id=f"aggregate-{number}") for number in range(3)]

    first, second = await store.claim_batch(2, LEASE_SECONDS)
    [third] = await store.claim_batch(2, LEASE_SECONDS)

    assert [event.id for event in (first, second, third)] == [event.id for event in added]
    assert {event.status for event in (first, second, third)} == {EventStatus.PROCESSING}
    assert first.lease_token == second.lease_token != third.lease_token
    expires = (clock.now + timedelta(seconds=LEASE_SECONDS)).isoformat(timespec="microseconds")
    assert rows(db_path, "SELECT DISTINCT status, retry_count, lease_expires_at FROM outbox") == [
        ("PROCESSING", 0, expires)
    ]
    assert await store.claim_batch(10, LEASE_SECONDS) == []


async def test_a_lease_holds_until_its_last_moment_and_not_longer(store: SQLiteStore, clock: FakeClock) -> None:
    await add_event(store)
    [first] = await store.claim_batch(1, LEASE_SECONDS)

    clock.advance(LEASE_SECONDS - 0.000001)
    assert await store.claim_batch(1, LEASE_SECONDS) == []
    clock.advance(0.000001)
    [second] = await store.claim_batch(1, LEASE_SECONDS)

    assert second.id == first.id
    assert second.lease_token != first.lease_token


async def test_an_expired_lease_that_is_taken_over_counts_as_an_attempt(store: SQLiteStore, clock: FakeClock) -> None:
    await add_event(store)
    counts: list[int] = []
    for _ in range(4):
        [event] = await store.claim_batch(1, LEASE_SECONDS)
        counts.append(event.retry_count)
        clock.advance(LEASE_SECONDS)

    assert counts == [0, 1, 2, 3]


async def test_expired_leases_come_before_what_is_new(store: SQLiteStore, clock: FakeClock) -> None:
    old = await add_event(store, aggregate_id="old")
    await store.claim_batch(1, LEASE_SECONDS)
    for number in range(5):
        await add_event(store, aggregate_id=f"new-{number}")
    clock.advance(LEASE_SECONDS)

    [event] = await store.claim_batch(1, LEASE_SECONDS)

    assert event.id == old.id


async def test_a_lease_without_an_end_is_taken_over_at_once(store: SQLiteStore, db_path: Path) -> None:
    await add_event(store)
    rows(db_path, "UPDATE outbox SET status = 'PROCESSING'")

    [event] = await store.claim_batch(1, LEASE_SECONDS)

    assert event.retry_count == 1


@each_settlement
async def test_the_late_settlement_of_a_lost_lease_changes_nothing(
    store: SQLiteStore, db_path: Path, clock: FakeClock, settle: Settle
) -> None:
    await add_event(store)
    [old] = await store.claim_batch(1, LEASE_SECONDS)
    clock.advance(LEASE_SECONDS)
    [new] = await store.claim_batch(1, LEASE_SECONDS)
    before = whole_row(db_path)

    assert not await settle(store, old)

    assert whole_row(db_path) == before
    assert await store.mark_event_published(new) is True


@each_settlement
@pytest.mark.parametrize("settled", SETTLEMENTS.values(), ids=[f"after {name}" for name in SETTLEMENTS])
async def test_a_settled_event_is_not_settled_again(
    store: SQLiteStore, db_path: Path, settled: Settle, settle: Settle
) -> None:
    await add_event(store)
    [event] = await store.claim_batch(1, LEASE_SECONDS)
    assert await settled(store, event)
    before = whole_row(db_path)

    assert not await settle(store, event)

    assert whole_row(db_path) == before


@each_settlement
async def test_what_was_never_claimed_cannot_be_settled(store: SQLiteStore, db_path: Path, settle: Settle) -> None:
    event = await add_event(store)
    before = whole_row(db_path)

    assert not await settle(store, event)

    assert whole_row(db_path) == before


@each_settlement
async def test_an_expired_lease_that_nobody_took_over_can_still_be_settled(
    store: SQLiteStore, clock: FakeClock, settle: Settle
) -> None:
    await add_event(store)
    [event] = await store.claim_batch(1, LEASE_SECONDS)
    clock.advance(10 * LEASE_SECONDS)

    assert await settle(store, event)


async def test_two_stores_on_one_file_never_lease_the_same_event(
    store: SQLiteStore, db_path: Path, clock: FakeClock
) -> None:
    for number in range(20):
        await add_event(store, aggregate_id=f"aggregate-{number}")

    async with SQLiteStore(db_path, clock=clock) as other:
        claims = await asyncio.gather(*(each.claim_batch(3, LEASE_SECONDS) for each in (store, other) * 5))

    sequences = [event.sequence for claim in claims for event in claim]
    assert sorted(sequences) == list(range(1, 21))


async def test_a_released_event_is_due_after_its_wait_and_no_attempt_is_counted(
    store: SQLiteStore, clock: FakeClock
) -> None:
    await add_event(store)
    [event] = await store.claim_batch(1, LEASE_SECONDS)
    assert await store.release(event, 5.0) is True

    clock.advance(4.999999)
    assert await store.claim_batch(1, LEASE_SECONDS) == []
    clock.advance(0.000001)
    [again] = await store.claim_batch(1, LEASE_SECONDS)

    assert again.retry_count == 0


async def test_a_failed_event_is_due_after_its_backoff_also_for_a_store_that_is_opened_meanwhile(
    store: SQLiteStore, db_path: Path, clock: FakeClock
) -> None:
    await add_event(store)
    [event] = await store.claim_batch(1, LEASE_SECONDS)
    result = await store.record_event_failure_or_quarantine(event, "HTTP 500", 3, 60.0)
    assert result == (EventStatus.PENDING, 1, None)

    async with SQLiteStore(db_path, clock=clock) as restarted:
        clock.advance(59.999999)
        assert await restarted.claim_batch(1, LEASE_SECONDS) == []
        clock.advance(0.000001)
        [again] = await restarted.claim_batch(1, LEASE_SECONDS)

    assert (again.retry_count, again.last_error) == (1, "HTTP 500")


async def test_a_lease_and_a_wait_may_be_longer_than_time_itself(store: SQLiteStore, clock: FakeClock) -> None:
    await add_event(store)
    [event] = await store.claim_batch(1, 1e300)
    assert await store.release(event, 1e300)

    clock.advance(timedelta(days=366 * 10).total_seconds())
    assert len(await store.claim_batch(1, LEASE_SECONDS)) == 1


@pytest.mark.parametrize("seconds", [-1.0, math.nan, math.inf])
async def test_a_time_span_that_is_none_is_refused_and_changes_nothing(
    store: SQLiteStore, db_path: Path, seconds: float
) -> None:
    await add_event(store)
    before = whole_row(db_path)
    with pytest.raises(ValueError, match="finite number of seconds"):
        await store.claim_batch(1, seconds)
    assert whole_row(db_path) == before

    [event] = await store.claim_batch(1, LEASE_SECONDS)
    before = whole_row(db_path)
    with pytest.raises(ValueError, match="finite number of seconds"):
        await store.release(event, seconds)
    with pytest.raises(ValueError, match="finite number of seconds"):
        await store.record_event_failure_or_quarantine(event, "HTTP 500", 3, seconds)
    assert whole_row(db_path) == before


async def test_a_negative_limit_is_refused_and_claims_nothing(store: SQLiteStore, db_path: Path) -> None:
    await add_event(store)

    with pytest.raises(ValueError, match="limit must not be negative, it is -1"):
        await store.claim_batch(-1, LEASE_SECONDS)  # to SQLite, LIMIT -1 is no limit

    assert await store.claim_batch(0, LEASE_SECONDS) == []
    assert rows(db_path, "SELECT status FROM outbox") == [("PENDING",)]


async def test_a_clock_that_steps_back_loses_nothing_and_delivers_nothing_twice(
    store: SQLiteStore, db_path: Path, clock: FakeClock
) -> None:
    await add_event(store, aggregate_id="leased")
    [leased] = await store.claim_batch(1, LEASE_SECONDS)
    await add_event(store, aggregate_id="waiting")

    clock.advance(-3600)
    assert (await store.stats()).oldest_pending_age_seconds == 0.0
    await add_event(store, aggregate_id="added-later")
    assert [event.aggregate_id for event in await store.claim_batch(10, 7200.0)] == ["added-later"]
    assert await store.mark_event_published(leased) is True

    clock.advance(3600)
    assert [event.aggregate_id for event in await store.claim_batch(10, LEASE_SECONDS)] == ["waiting"]
    assert rows(db_path, "SELECT aggregate_id, retry_count FROM outbox WHERE status != 'PUBLISHED'") == [
        ("waiting", 0),
        ("added-later", 0),
    ]


# --- waiting for work ---

WAKING: dict[str, Callable[[SQLiteStore, OutboxEvent], Awaitable[object]]] = SETTLEMENTS | {
    "order": lambda store, _: store.create_order_with_outbox_event(ORDER),
    "transaction": lambda store, _: add_event(store, number=2),
    "replay": lambda store, event: store.replay_dead_letter(event.id),
}


@pytest.mark.parametrize("commit", WAKING.values(), ids=WAKING)
async def test_each_commit_after_which_an_event_may_be_due_wakes_those_who_wait(
    store: SQLiteStore, commit: Settle
) -> None:
    await add_event(store)
    [event] = await store.claim_batch(1, LEASE_SECONDS)
    await store.wait_for_events(60.0)  # returns at once: it was woken by the event

    waiting = [asyncio.create_task(store.wait_for_events(60.0)) for _ in range(2)]
    await asyncio.sleep(0)
    assert not any(task.done() for task in waiting)
    await commit(store, event)

    async with asyncio.timeout(10):
        await asyncio.gather(*waiting)


async def test_waiting_ends_after_its_time(store: SQLiteStore) -> None:
    async with asyncio.timeout(10):
        await store.wait_for_events(0.001)


# --- dispatchers in processes of their own ---

_DISPATCH = """
import asyncio, sys
from datetime import UTC, datetime, timedelta
from outbox.config import AppConfig
from outbox.database import SQLiteStore
from outbox.dispatcher import OutboxDispatcher
from outbox.models import EventStatus

async def main(path, url, max_in_flight, lives_before):
    config = AppConfig(db_path=path, consumer_endpoint=url, max_in_flight=max_in_flight, poll_interval=0.01)
    # Each life begins when the leases of the one before have expired.
    clock = lambda: datetime.now(UTC) + timedelta(hours=lives_before)
    async with SQLiteStore(path, clock=clock) as store, OutboxDispatcher(config, store):
        while (counts := (await store.stats()).counts)[EventStatus.PENDING] or counts[EventStatus.PROCESSING]:
            await store.wait_for_events(0.02)

asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
"""


def dispatch(db_path: Path, url: str, *, max_in_flight: int, lives_before: int = 0) -> "subprocess.Popen[bytes]":
    arguments = [str(db_path), f"{url}/webhooks", str(max_in_flight), str(lives_before)]
    return subprocess.Popen([sys.executable, "-c", _DISPATCH, *arguments])


async def ended(process: "subprocess.Popen[bytes]") -> int:
    return await asyncio.to_thread(process.wait, 30)


async def test_two_dispatcher_processes_deliver_each_event_once(db_path: Path) -> None:
    hits: Counter[bytes] = Counter()
    both_at_work = asyncio.Barrier(10)

    async def count(payload: bytes) -> None:
        hits[payload] += 1
        if len(hits) <= 10:
            await both_at_work.wait()  # ten at a time: one process alone has no more than five under way

    consumer = InMemoryIdempotencyStore(side_effect=count)
    async with SQLiteStore(db_path) as store:
        for number in range(200):
            await add_event(store, aggregate_id=f"aggregate-{number % 50}", number=number)
        async with serve(create_app(consumer)) as url:
            exits = await asyncio.gather(*(ended(dispatch(db_path, url, max_in_flight=5)) for _ in range(2)))

    assert exits == [0, 0]
    assert rows(db_path, "SELECT status, max(retry_count), count(*) FROM outbox GROUP BY status") == [
        ("PUBLISHED", 0, 200)
    ]
    assert set(hits.values()) == {1}
    assert (consumer.delivery_hits, len(hits)) == (200, 200)


async def test_an_event_that_kills_its_process_ends_in_the_dead_letter_queue_unsent(db_path: Path) -> None:
    process: subprocess.Popen[bytes]
    poison_deliveries = 0

    async def kill_the_sender_of_poison(payload: bytes) -> None:
        nonlocal poison_deliveries
        if "poison" in json.loads(payload)["data"]:
            poison_deliveries += 1
            process.kill()
            raise RuntimeError("nobody is left to hear this")

    consumer = InMemoryIdempotencyStore(side_effect=kill_the_sender_of_poison)
    async with SQLiteStore(db_path) as store, serve(create_app(consumer)) as url:
        await add_event(store, aggregate_id="poisoned", poison=True)
        await add_event(store, aggregate_id="poisoned", number=1)
        await add_event(store, aggregate_id="sound", number=2)
        exits: list[int] = []
        for life in range(4):
            process = dispatch(db_path, url, max_in_flight=1, lives_before=life)
            exits.append(await ended(process))
        [dead_letter] = await store.list_dead_letters()

    assert exits == [-signal.SIGKILL] * 3 + [0]
    assert poison_deliveries == 3
    assert dead_letter.failure_reason.startswith("not sent again: its ")
    assert rows(db_path, "SELECT status, retry_count FROM outbox ORDER BY sequence") == [
        ("DEAD_LETTER", 3),
        ("PUBLISHED", 0),
        ("PUBLISHED", 0),
    ]
