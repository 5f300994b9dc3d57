"""Backoff: stored with the event, doubling, capped, and never a reason for another event to wait (Section 4.3)."""

from datetime import datetime
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outbox.config import AppConfig
from outbox.database import SQLiteStore
from outbox.delivery import calculate_backoff
from outbox.dispatcher import OutboxDispatcher
from outbox.models import EventStatus
from tests.outbox.conftest import FakeClock
from tests.outbox.misbehaving import answering, raw_server
from tests.outbox.support import add_event, rows

URL = "http://127.0.0.1:9/webhooks"


@pytest.mark.parametrize(
    ("failures_before", "seconds"), [(0, 0.5), (1, 1.0), (2, 2.0), (6, 32.0), (7, 60.0), (5000, 60.0), (10**9, 60.0)]
)
def test_the_backoff_doubles_up_to_its_cap_at_any_retry_count(failures_before: int, seconds: float) -> None:
    config = AppConfig(consumer_endpoint=URL, base_backoff=0.5, max_backoff=60.0)
    assert calculate_backoff(config, failures_before) == seconds


_seconds = st.floats(min_value=1e-300, max_value=1e300)


@settings(deadline=None)
@given(base=_seconds, cap=_seconds, failures=st.integers(0, 10**12), full_jitter=st.booleans())
def test_no_setting_makes_the_backoff_leave_its_bounds(
    base: float, cap: float, failures: int, full_jitter: bool
) -> None:
    base, cap = min(base, cap), max(base, cap)
    config = AppConfig(consumer_endpoint=URL, base_backoff=base, max_backoff=cap, full_jitter=full_jitter)
    assert (0.0 if full_jitter else base) <= calculate_backoff(config, failures) <= cap


def test_full_jitter_draws_from_the_whole_range() -> None:
    config = AppConfig(consumer_endpoint=URL, base_backoff=1.0, max_backoff=8.0, full_jitter=True)
    for failures, longest in ((0, 1.0), (2, 4.0), (50, 8.0)):
        draws = [calculate_backoff(config, failures) for _ in range(1000)]
        assert 0.0 <= min(draws) < longest / 4
        assert longest * 3 / 4 < max(draws) <= longest


async def test_each_failure_stores_when_the_event_is_due_again(
    store: SQLiteStore, db_path: Path, clock: FakeClock
) -> None:
    await add_event(store)
    async with raw_server(answering("500 Oops")) as server:
        config = AppConfig(consumer_endpoint=server.url, base_backoff=1.0, max_backoff=3.0, max_delivery_attempts=9)
        waits = []
        for _ in range(4):
            assert await OutboxDispatcher(config, store).process_batch() == [EventStatus.PENDING]
            [(due,)] = rows(db_path, "SELECT next_attempt_at FROM outbox")
            waits.append((datetime.fromisoformat(due) - clock.now).total_seconds())
            clock.advance(waits[-1])
    assert waits == [1.0, 2.0, 3.0, 3.0]


async def test_a_restart_does_not_shorten_the_backoff(db_path: Path, clock: FakeClock) -> None:
    async with raw_server(answering("500 Oops")) as server:
        config = AppConfig(consumer_endpoint=server.url, base_backoff=10.0)
        async with SQLiteStore(db_path, clock=clock) as store:
            await add_event(store)
            assert await OutboxDispatcher(config, store).process_batch() == [EventStatus.PENDING]
        clock.advance(9.999)
        async with SQLiteStore(db_path, clock=clock) as store:
            assert await OutboxDispatcher(config, store).process_batch() == []
            clock.advance(0.001)
            assert await OutboxDispatcher(config, store).process_batch() == [EventStatus.PENDING]
        assert len(server.requests) == 2
    assert rows(db_path, "SELECT retry_count FROM outbox") == [(2,)]


async def test_a_retry_count_of_5000_does_not_overflow(store: SQLiteStore, db_path: Path, clock: FakeClock) -> None:
    await add_event(store)
    rows(db_path, "UPDATE outbox SET retry_count = 5000")
    async with raw_server(answering("500 Oops")) as server:
        config = AppConfig(consumer_endpoint=server.url, max_delivery_attempts=10_000, max_backoff=60.0)
        assert await OutboxDispatcher(config, store).process_batch() == [EventStatus.PENDING]
    [(retry_count, due)] = rows(db_path, "SELECT retry_count, next_attempt_at FROM outbox")
    assert retry_count == 5001
    assert (datetime.fromisoformat(due) - clock.now).total_seconds() == 60.0


async def test_an_event_claimed_with_its_attempts_used_up_is_quarantined_without_being_sent(
    store: SQLiteStore, db_path: Path
) -> None:
    await add_event(store)
    rows(db_path, "UPDATE outbox SET retry_count = 3, last_error = 'HTTP 500'")
    async with raw_server(answering("200 OK")) as server:
        config = AppConfig(consumer_endpoint=server.url, max_delivery_attempts=3)
        assert await OutboxDispatcher(config, store).process_batch() == [EventStatus.DEAD_LETTER]
        assert server.requests == []
    [(retry_count, reason)] = rows(db_path, "SELECT retry_count, last_error FROM outbox")
    assert retry_count == 3
    assert reason == (
        "not sent again: its 3 attempts are used up, counting those whose lease expired (before: HTTP 500)"
    )


async def test_an_event_that_waits_in_its_backoff_delays_no_other(store: SQLiteStore, db_path: Path) -> None:
    for number in range(5):
        await add_event(store, f"failing-{number}", number=number)
    async with raw_server(answering("500 Oops")) as server:
        config = AppConfig(consumer_endpoint=server.url, batch_size=5)
        assert await OutboxDispatcher(config, store).process_batch() == [EventStatus.PENDING] * 5
    await add_event(store, "healthy")
    async with raw_server(answering("200 OK")) as server:
        config = AppConfig(consumer_endpoint=server.url, batch_size=1)
        assert await OutboxDispatcher(config, store).process_batch() == [EventStatus.PUBLISHED]
    assert rows(db_path, "SELECT aggregate_id FROM outbox WHERE status = 'PUBLISHED'") == [("healthy",)]
