"""The dispatcher's loop: what one event, one consumer or one fault does to all the others: nothing (Section 4.2)."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from outbox.config import AppConfig
from outbox.database import SQLiteStore
from outbox.dispatcher import CLAIM_FAULT, SETTLE_FAULT, OutboxDispatcher
from outbox.mock_consumer import InMemoryIdempotencyStore
from outbox.models import EventStatus, OutboxEvent
from tests.outbox.conftest import FakeClock
from tests.outbox.misbehaving import Exchange, Held, answering, head, raw_server
from tests.outbox.support import ORDER, add_event, rows, wait_until


def aggregates(db_path: Path, status: str) -> set[str]:
    return {name for (name,) in rows(db_path, "SELECT aggregate_id FROM outbox WHERE status = ?", status)}


def settings(url: str, **given: Any) -> AppConfig:
    return AppConfig(**{"consumer_endpoint": url, "poll_interval": 0.02, "base_backoff": 0.001} | given)


# --- no event waits for another's consumer ---


class Troubled:
    """Hangs at one aggregate until the test ends it, answers 500 to another, and is well otherwise."""

    def __init__(self) -> None:
        self.hanging = self.failed = 0
        self.let_go = asyncio.Event()

    async def __call__(self, exchange: Exchange) -> None:
        aggregate_id = json.loads(exchange.body)["aggregate_id"]
        if aggregate_id == "hangs":
            self.hanging += 1
            await self.let_go.wait()
        self.failed += aggregate_id == "fails"
        await exchange.send(head("500 Oops" if aggregate_id == "fails" else "200 OK", "Content-Length: 0"))


async def test_an_event_that_fails_for_ever_and_one_that_hangs_hold_up_none_of_a_hundred_others(db_path: Path) -> None:
    others = {f"other-{number}" for number in range(100)}
    troubled = Troubled()
    async with SQLiteStore(db_path) as store, raw_server(troubled) as server:
        for name in ("hangs", "fails", *others):
            await add_event(store, name)
        async with OutboxDispatcher(settings(server.url, max_delivery_attempts=10**9, max_backoff=0.001), store):
            await wait_until(lambda: aggregates(db_path, "PUBLISHED") == others, seconds=30)
            await wait_until(lambda: troubled.failed >= 3)  # and it is still tried
            assert troubled.hanging == 1
            assert aggregates(db_path, "PROCESSING") >= {"hangs"}
            troubled.let_go.set()


async def test_consumers_that_hang_in_every_slot_hold_the_others_up_for_one_deadline_at_most(db_path: Path) -> None:
    troubled = Troubled()
    async with SQLiteStore(db_path) as store, raw_server(troubled) as server:
        for number in range(3):
            await add_event(store, "hangs", number=number)
        await add_event(store, "well")
        config = settings(server.url, max_in_flight=1, request_timeout=0.1, lease_seconds=30.0, base_backoff=30.0)
        async with OutboxDispatcher(config, store):
            await wait_until(lambda: aggregates(db_path, "PUBLISHED") == {"well"})
    assert troubled.hanging == 1


# --- it claims what it can deliver, and no more ---


@pytest.mark.parametrize(("batch_size", "max_in_flight"), [(10, 3), (3, 10)])
async def test_what_is_claimed_is_under_way(
    store: SQLiteStore, db_path: Path, batch_size: int, max_in_flight: int
) -> None:
    held = Held()
    for number in range(20):
        await add_event(store, f"a-{number}")
    async with raw_server(held) as server:
        config = settings(server.url, batch_size=batch_size, max_in_flight=max_in_flight)
        async with OutboxDispatcher(config, store):
            await wait_until(lambda: held.arrived == max_in_flight)
            await asyncio.sleep(0.1)  # would it claim more, it had time to
            assert len(aggregates(db_path, "PROCESSING")) == held.arrived == max_in_flight
            held.let_go.set()
            await wait_until(lambda: len(aggregates(db_path, "PUBLISHED")) == 20)


async def test_a_batch_beside_the_loop_takes_only_the_slots_that_are_free(store: SQLiteStore, db_path: Path) -> None:
    held = Held()
    for number in range(4):
        await add_event(store, f"a-{number}")
    async with raw_server(held) as server:
        dispatcher = OutboxDispatcher(settings(server.url, max_in_flight=4), store)
        async with dispatcher:
            await wait_until(lambda: held.arrived == 4)
            await add_event(store, "one-more")
            assert await dispatcher.process_batch() == []
            held.let_go.set()
            await wait_until(lambda: len(aggregates(db_path, "PUBLISHED")) == 5)


async def test_a_batch_tells_what_became_of_each_event_in_their_order(store: SQLiteStore) -> None:
    for name in ("well", "fails", "well-too"):
        await add_event(store, name)
    async with raw_server(Troubled()) as server:
        dispatcher = OutboxDispatcher(settings(server.url, base_backoff=1.0), store)
        published, pending = EventStatus.PUBLISHED, EventStatus.PENDING
        assert await dispatcher.process_batch() == [published, pending, published]
        assert await dispatcher.process_batch() == []


# --- what wakes it ---


async def test_a_commit_of_this_process_wakes_it_at_once(
    store: SQLiteStore, config: AppConfig, idempotency_store: InMemoryIdempotencyStore
) -> None:
    async with OutboxDispatcher(config.model_copy(update={"poll_interval": 3600.0}), store):
        await asyncio.sleep(0.05)  # it has found nothing, and waits
        await store.create_order_with_outbox_event(ORDER)
        await wait_until(lambda: idempotency_store.side_effects_count == 1)
        await store.create_order_with_outbox_event(ORDER)
        await wait_until(lambda: idempotency_store.side_effects_count == 2)


async def test_what_another_process_commits_is_found_by_polling(
    db_path: Path, config: AppConfig, idempotency_store: InMemoryIdempotencyStore
) -> None:
    async with SQLiteStore(db_path) as store, SQLiteStore(db_path) as elsewhere, OutboxDispatcher(config, store):
        await asyncio.sleep(0.05)
        await elsewhere.create_order_with_outbox_event(ORDER)
        await wait_until(lambda: idempotency_store.side_effects_count == 1)


async def test_the_next_of_an_aggregate_follows_without_waiting_for_a_poll(
    store: SQLiteStore, config: AppConfig, idempotency_store: InMemoryIdempotencyStore
) -> None:
    for number in range(20):
        await add_event(store, "the-only-one", number=number)
    async with OutboxDispatcher(config.model_copy(update={"poll_interval": 3600.0}), store):
        await wait_until(lambda: idempotency_store.side_effects_count == 20)


# --- a delivery that raises anything ---


class Raising(httpx.AsyncBaseTransport):
    """Raises something for one aggregate, and sends what is for the others."""

    def __init__(self, error: BaseException) -> None:
        self._error = error
        self._sound = httpx.AsyncHTTPTransport()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if json.loads(await request.aread())["aggregate_id"] == "troubled":
            raise self._error
        return await self._sound.handle_async_request(request)

    async def aclose(self) -> None:
        await self._sound.aclose()


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("a bug in the client"),
        KeyError("a key"),
        ExceptionGroup("several", [OSError("one"), ValueError("two")]),
        BaseExceptionGroup("worse", [asyncio.CancelledError()]),
        asyncio.CancelledError("not ours"),
        TimeoutError("the client's own"),
        RecursionError(),
        MemoryError(),
        UnicodeEncodeError("ascii", "\ud800", 0, 1, "a text that cannot be written"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_a_delivery_that_raises_anything_is_a_failed_attempt_and_the_others_are_delivered(
    store: SQLiteStore, db_path: Path, error: BaseException
) -> None:
    others = {f"other-{number}" for number in range(5)}
    for name in ("troubled", *others):
        await add_event(store, name)
    async with (
        raw_server(answering("200 OK")) as server,
        httpx.AsyncClient(transport=Raising(error)) as client,
        OutboxDispatcher(settings(server.url, base_backoff=30.0), store, client),
    ):
        await wait_until(lambda: aggregates(db_path, "PUBLISHED") == others)
        await wait_until(lambda: aggregates(db_path, "PENDING") == {"troubled"})
    [(status, retry_count, last_error)] = rows(
        db_path, "SELECT status, retry_count, last_error FROM outbox WHERE aggregate_id = 'troubled'"
    )
    assert (status, retry_count) == ("PENDING", 1)
    assert type(error).__name__ in last_error


# --- a database that raises anything ---


@contextmanager
def failing(
    store: SQLiteStore, method: str, *errors: Exception, if_: Callable[..., bool] = lambda *_: True
) -> Iterator[None]:
    """The store's method raises these, one a call, and then works again."""
    works = getattr(store, method)
    left = list(errors)

    async def fails(*arguments: Any) -> Any:
        if left and if_(*arguments):
            raise left.pop(0)
        return await works(*arguments)

    setattr(store, method, fails)
    try:
        yield
        assert not left
    finally:
        delattr(store, method)


@asynccontextmanager
async def at_work(store: SQLiteStore, db_path: Path, *names: str) -> AsyncIterator[None]:
    """A dispatcher delivers events of these aggregates: all are published at the end of the block."""
    for name in names:
        await add_event(store, name)
    async with raw_server(answering("200 OK")) as server, OutboxDispatcher(settings(server.url), store):
        yield
        await wait_until(lambda: aggregates(db_path, "PUBLISHED") >= set(names))


FAULTS = [OSError("the network drive is gone"), RuntimeError("a bug"), KeyError("sequence"), TimeoutError()]


@pytest.mark.parametrize("method", ["claim_batch", "wait_for_events"])
async def test_whatever_a_claim_or_a_wait_raises_the_loop_goes_on_and_logs_each_cause_once(
    store: SQLiteStore, db_path: Path, caplog: pytest.LogCaptureFixture, method: str
) -> None:
    caplog.set_level("INFO")
    with failing(store, method, *FAULTS, *FAULTS):
        async with at_work(store, db_path):
            await wait_until(lambda: f"Recovered from: {CLAIM_FAULT}" in caplog.messages)
            await store.create_order_with_outbox_event(ORDER)
            await wait_until(lambda: rows(db_path, "SELECT status FROM outbox") == [("PUBLISHED",)])
    logged = [record.__dict__["error"] for record in caplog.records if record.message == CLAIM_FAULT]
    assert logged == [f"{type(error).__name__}: {error}" for error in FAULTS]


async def test_a_fault_that_comes_back_after_a_recovery_is_news(
    store: SQLiteStore, db_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    recovered = f"Recovered from: {CLAIM_FAULT}"
    async with at_work(store, db_path):
        with failing(store, "claim_batch", OSError("gone"), OSError("gone")):
            await wait_until(lambda: recovered in caplog.messages)
        with failing(store, "claim_batch", OSError("gone"), OSError("gone")):
            await wait_until(lambda: caplog.messages.count(recovered) == 2)
    assert caplog.messages.count(CLAIM_FAULT) == 2


async def test_a_settlement_that_fails_is_tried_again_and_not_the_delivery(
    store: SQLiteStore,
    db_path: Path,
    config: AppConfig,
    idempotency_store: InMemoryIdempotencyStore,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")

    def is_the_troubled(event: OutboxEvent) -> bool:
        return event.aggregate_id == "troubled"

    for name in ("troubled", "other"):
        await add_event(store, name)
    with failing(store, "mark_event_published", OSError("gone"), OSError("gone"), if_=is_the_troubled):
        async with OutboxDispatcher(config, store):
            await wait_until(lambda: aggregates(db_path, "PUBLISHED") == {"troubled", "other"})
    assert idempotency_store.delivery_hits == 2
    assert caplog.messages.count(SETTLE_FAULT) == 1
    assert caplog.messages.count(f"Recovered from: {SETTLE_FAULT}") == 1


async def test_one_batch_raises_what_its_claim_raises(store: SQLiteStore, config: AppConfig) -> None:
    with failing(store, "claim_batch", OSError("gone")), pytest.raises(OSError, match="gone"):
        await OutboxDispatcher(config, store).process_batch()


async def test_the_age_of_the_oldest_pending_event_shows_that_it_is_not_getting_through(
    store: SQLiteStore, db_path: Path, clock: FakeClock
) -> None:
    await add_event(store)
    async with (
        raw_server(answering("500 Oops")) as server,
        OutboxDispatcher(settings(server.url, base_backoff=7200.0, max_backoff=7200.0), store),
    ):
        await wait_until(lambda: rows(db_path, "SELECT status, retry_count FROM outbox") == [("PENDING", 1)])
        clock.advance(3600)
        assert (await store.stats()).oldest_pending_age_seconds == 3600.0


# --- a lease that is lost ---


async def test_a_lease_lost_under_way_is_logged_and_the_newer_owners_result_stands(
    store: SQLiteStore, db_path: Path, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    held = Held()
    await add_event(store)
    async with raw_server(held) as server:
        config = settings(server.url, max_in_flight=1)  # so it does not claim the event again itself
        async with OutboxDispatcher(config, store):
            await wait_until(lambda: held.arrived == 1)
            clock.advance(config.lease_seconds)
            async with SQLiteStore(db_path, clock=clock) as newer:
                [event] = await newer.claim_batch(1, 30)
                assert await newer.record_event_failure_or_quarantine(event, "the newer owner's", 9, None)
            held.let_go.set()
            await wait_until(lambda: any(message.startswith("Lease lost") for message in caplog.messages))
    assert rows(db_path, "SELECT status, last_error FROM outbox") == [("DEAD_LETTER", "the newer owner's")]
