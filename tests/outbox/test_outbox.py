"""The article's six invariants, by its names (Section 5)."""

from pathlib import Path

import httpx
import pytest

from outbox.config import AppConfig
from outbox.database import SQLiteStore
from outbox.dispatcher import OutboxDispatcher
from outbox.mock_consumer import InMemoryIdempotencyStore, create_app
from outbox.models import EventStatus, compute_idempotency_key
from tests.outbox.conftest import FakeClock
from tests.outbox.support import ORDER, rows


async def test_atomic_transaction_order_and_outbox_success(store: SQLiteStore, db_path: Path) -> None:
    order, event = await store.create_order_with_outbox_event(ORDER)

    assert rows(db_path, "PRAGMA journal_mode") == [("wal",)]
    assert rows(db_path, "SELECT id, customer_email, amount FROM orders") == [(order.id, "ada@example.com", "149.90")]
    assert rows(db_path, "SELECT id, aggregate_id, status, retry_count FROM outbox") == [
        (event.id, order.id, "PENDING", 0)
    ]


async def test_atomic_rollback_on_failure(store: SQLiteStore, db_path: Path) -> None:
    orders_seen_by_the_transaction: list[str] = []

    def fail() -> None:
        orders_seen_by_the_transaction.append("the first insert is done")
        raise RuntimeError("between the two inserts")

    with pytest.raises(RuntimeError, match="between the two inserts"):
        await store.create_order_with_outbox_event(ORDER, failure_injector=fail)

    assert orders_seen_by_the_transaction == ["the first insert is done"]
    assert rows(db_path, "SELECT count(*) FROM orders") == [(0,)]
    assert rows(db_path, "SELECT count(*) FROM outbox") == [(0,)]


def test_sha256_idempotency_key_deterministic() -> None:
    key = compute_idempotency_key({"a": 1, "b": {"c": [1, 2], "d": "é"}})

    assert key == compute_idempotency_key({"b": {"d": "é", "c": [1, 2]}, "a": 1})
    assert key == compute_idempotency_key('{ "b" : {"d":"\\u00e9", "c":[1,2]},\n "a": 1 }')
    assert key != compute_idempotency_key({"a": 1, "b": {"c": [2, 1], "d": "é"}})
    assert len(key) == 64
    assert set(key) <= set("0123456789abcdef")


async def test_dispatcher_publishes_pending_event(
    store: SQLiteStore, db_path: Path, idempotency_store: InMemoryIdempotencyStore
) -> None:
    _, event = await store.create_order_with_outbox_event(ORDER)
    transport = httpx.ASGITransport(create_app(idempotency_store))

    async with httpx.AsyncClient(transport=transport) as client:
        config = AppConfig(db_path=db_path, consumer_endpoint="http://consumer/webhooks")
        outcomes = await OutboxDispatcher(config, store, client).process_batch()

    assert event.status == EventStatus.PENDING
    assert outcomes == [EventStatus.PUBLISHED]
    assert rows(db_path, "SELECT id, status FROM outbox") == [(event.id, "PUBLISHED")]
    assert idempotency_store.side_effects_count == 1


async def test_dispatcher_retries_and_quarantines_to_dlq(
    store: SQLiteStore, db_path: Path, clock: FakeClock, idempotency_store: InMemoryIdempotencyStore
) -> None:
    _, event = await store.create_order_with_outbox_event(ORDER)
    transport = httpx.ASGITransport(create_app(idempotency_store))

    async with httpx.AsyncClient(transport=transport) as client:
        config = AppConfig(
            db_path=db_path,
            consumer_endpoint="http://consumer/webhooks?simulate_failure=true",
            max_delivery_attempts=3,
            base_backoff=0.05,
        )
        dispatcher = OutboxDispatcher(config, store, client)
        for retry_count in (1, 2):
            assert await dispatcher.process_batch() == [EventStatus.PENDING]
            assert rows(db_path, "SELECT retry_count FROM outbox") == [(retry_count,)]
            clock.advance(0.1)
        assert await dispatcher.process_batch() == [EventStatus.DEAD_LETTER]

    assert rows(db_path, "SELECT status, retry_count FROM outbox") == [("DEAD_LETTER", 3)]
    assert rows(db_path, "SELECT original_event_id, payload_json FROM dead_letter_queue") == [
        (event.id, event.payload_json)
    ]
    assert idempotency_store.side_effects_count == 0


async def test_consumer_idempotency_deduplication(idempotency_store: InMemoryIdempotencyStore) -> None:
    payload = {"order_id": "1", "amount": "149.90"}
    headers = {"Idempotency-Key": compute_idempotency_key(payload)}

    async with httpx.AsyncClient(transport=httpx.ASGITransport(create_app(idempotency_store))) as client:
        answers = [await client.post("http://consumer/webhooks", json=payload, headers=headers) for _ in range(3)]

    assert [answer.status_code for answer in answers] == [200, 200, 200]
    assert [answer.json()["status"] for answer in answers] == ["processed", "duplicate", "duplicate"]
    assert idempotency_store.side_effects_count == 1
    assert idempotency_store.delivery_hits == 3
