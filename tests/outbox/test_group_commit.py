"""Operations that wait at the same time share one commit, and one's failure is its own."""

import asyncio
import sqlite3
from pathlib import Path

import pytest

from outbox.database import SQLiteStore
from outbox.models import EventStatus, OrderCreate
from tests.outbox.support import (
    ORDER,
    add_event,
    assert_nothing_is_left_running,
    orders_and_events,
    rows,
    write_lock_is_free,
)


def order_of(name: str) -> OrderCreate:
    return ORDER.model_copy(update={"customer_email": f"{name}@example.com"})


ORDERS = [order_of(name) for name in ("ada", "grace", "mallory", "edsger", "barbara")]


async def place_all(store: SQLiteStore, orders: list[OrderCreate]) -> list[BaseException | None]:
    """Place the orders at the same time; return the error of each."""
    placed = (store.create_order_with_outbox_event(order) for order in orders)
    results = await asyncio.gather(*placed, return_exceptions=True)
    return [result if isinstance(result, BaseException) else None for result in results]


def emails(db_path: Path) -> list[str]:
    return [email.partition("@")[0] for (email,) in rows(db_path, "SELECT customer_email FROM orders ORDER BY rowid")]


async def test_orders_placed_at_the_same_time_share_one_commit(store: SQLiteStore, db_path: Path) -> None:
    committed_before_each: list[tuple[int, int]] = []

    def look() -> None:
        committed_before_each.append(orders_and_events(db_path))

    await asyncio.gather(*(store.create_order_with_outbox_event(ORDER, failure_injector=look) for _ in range(50)))

    assert committed_before_each == [(0, 0)] * 50
    assert orders_and_events(db_path) == (50, 50)


async def test_an_operation_that_fails_leaves_those_that_share_its_commit_alone(
    store: SQLiteStore, db_path: Path
) -> None:
    def fail() -> None:
        raise RuntimeError("mallory")

    ada, mallory, grace = await asyncio.gather(
        store.create_order_with_outbox_event(order_of("ada")),
        store.create_order_with_outbox_event(order_of("mallory"), failure_injector=fail),
        store.create_order_with_outbox_event(order_of("grace")),
        return_exceptions=True,
    )

    assert isinstance(mallory, RuntimeError)
    assert not isinstance(ada, BaseException)
    assert not isinstance(grace, BaseException)
    assert emails(db_path) == ["ada", "grace"]
    assert_nothing_is_left_running(db_path)


WHOLE_TRANSACTION_ROLLED_BACK = """
    CREATE TRIGGER no_mallory BEFORE INSERT ON orders WHEN NEW.customer_email LIKE 'mallory%'
    BEGIN SELECT RAISE(ROLLBACK, 'the whole transaction'); END
"""
COMMIT_REFUSED = """
    CREATE TRIGGER no_mallory AFTER INSERT ON orders WHEN NEW.customer_email LIKE 'mallory%'
    BEGIN INSERT INTO child VALUES ('nobody'); END
"""


@pytest.mark.parametrize(
    ("trigger", "message"),
    [(WHOLE_TRANSACTION_ROLLED_BACK, "the whole transaction"), (COMMIT_REFUSED, "FOREIGN KEY constraint failed")],
    ids=["one operation rolls back the whole transaction", "COMMIT fails because of one operation"],
)
@pytest.mark.parametrize("position", range(len(ORDERS)))
async def test_an_operation_that_undoes_the_shared_transaction_fails_alone(
    store: SQLiteStore, db_path: Path, trigger: str, message: str, position: int
) -> None:
    rows(db_path, "CREATE TABLE child (parent REFERENCES orders (id) DEFERRABLE INITIALLY DEFERRED)")
    rows(db_path, trigger)
    orders = [order for order in ORDERS if order != order_of("mallory")]
    orders.insert(position, order_of("mallory"))

    errors = await place_all(store, orders)

    culprit = errors.pop(position)
    assert errors == [None] * len(errors)
    assert isinstance(culprit, sqlite3.IntegrityError)
    assert str(culprit) == f"{db_path}: {message}"
    assert emails(db_path) == ["ada", "grace", "edsger", "barbara"]
    assert_nothing_is_left_running(db_path)


@pytest.mark.parametrize("position", range(3))
async def test_a_settlement_that_undoes_the_shared_transaction_fails_alone(
    store: SQLiteStore, db_path: Path, position: int
) -> None:
    for number in range(3):
        await add_event(store, aggregate_id=f"aggregate-{number}")
    events = await store.claim_batch(3, 30.0)
    rows(
        db_path,
        f"""
        CREATE TRIGGER never BEFORE UPDATE ON outbox WHEN NEW.status = 'PUBLISHED' AND NEW.id = '{events[position].id}'
        BEGIN SELECT RAISE(ROLLBACK, 'the whole transaction'); END
        """,
    )

    *settled, order = await asyncio.gather(
        *(store.mark_event_published(event) for event in events),
        store.create_order_with_outbox_event(ORDER),
        return_exceptions=True,
    )

    culprit = settled.pop(position)
    assert settled == [True, True]
    assert isinstance(culprit, sqlite3.IntegrityError)
    assert not isinstance(order, BaseException)
    assert rows(db_path, "SELECT count(*) FROM outbox WHERE status = 'PUBLISHED'") == [(2,)]
    assert rows(db_path, "SELECT status FROM outbox WHERE id = ?", events[position].id) == [("PROCESSING",)]
    assert rows(db_path, "SELECT count(*) FROM orders") == [(1,)]


async def test_a_commit_that_fails_for_all_is_an_error_for_all_and_leaves_nothing(
    store: SQLiteStore, db_path: Path
) -> None:
    rows(db_path, "CREATE TABLE child (parent REFERENCES orders (id) DEFERRABLE INITIALLY DEFERRED)")
    rows(db_path, "CREATE TRIGGER nobody AFTER INSERT ON orders BEGIN INSERT INTO child VALUES ('nobody'); END")

    errors = await place_all(store, ORDERS)

    assert [str(error) for error in errors] == [f"{db_path}: FOREIGN KEY constraint failed"] * len(ORDERS)
    assert len({id(error) for error in errors}) == len(ORDERS)
    assert orders_and_events(db_path) == (0, 0)
    assert_nothing_is_left_running(db_path)
    rows(db_path, "DROP TRIGGER nobody")
    await store.create_order_with_outbox_event(ORDER)


async def test_a_crowd_larger_than_one_commit_takes_is_served_in_its_order(
    store: SQLiteStore, db_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outbox.connection.OPERATIONS_PER_COMMIT", 7)
    names = [f"customer-{number}" for number in range(50)]

    assert await place_all(store, [order_of(name) for name in names]) == [None] * 50

    assert emails(db_path) == names


async def test_a_transaction_has_its_turn_between_the_operations_before_and_behind_it(
    store: SQLiteStore, db_path: Path
) -> None:
    async def transaction() -> None:
        async with store.transaction() as conn:
            await conn.execute("INSERT INTO orders VALUES ('1', 'transaction@example.com', '1', 'CREATED', '')")

    await asyncio.gather(
        store.create_order_with_outbox_event(order_of("before")),
        transaction(),
        store.create_order_with_outbox_event(order_of("behind")),
    )

    assert emails(db_path) == ["before", "transaction", "behind"]


async def test_a_transaction_is_not_starved_by_a_stream_of_operations(store: SQLiteStore, db_path: Path) -> None:
    served = asyncio.Event()

    async def ask_again_and_again() -> int:
        asked = 0
        while not served.is_set():
            await store.stats()
            asked += 1
        return asked

    async def transaction() -> None:
        async with store.transaction():
            served.set()

    async with asyncio.timeout(10):
        await asyncio.gather(*(ask_again_and_again() for _ in range(10)), transaction())
    assert write_lock_is_free(db_path)


async def test_a_read_that_fails_leaves_the_writes_beside_it_alone(store: SQLiteStore, db_path: Path) -> None:
    await add_event(store)

    order, page, stats, claimed = await asyncio.gather(
        store.create_order_with_outbox_event(ORDER),
        store.list_dead_letters(after="nobody"),
        store.stats(),
        store.claim_batch(1, 30.0),
        return_exceptions=True,
    )

    assert isinstance(page, ValueError)
    assert not isinstance(order, BaseException)
    assert not isinstance(stats, BaseException)
    assert not isinstance(claimed, BaseException)
    assert stats.counts[EventStatus.PENDING] == 1
    assert len(claimed) == 1


async def test_a_claim_gives_each_event_to_one_of_many_that_ask_at_the_same_time(store: SQLiteStore) -> None:
    for number in range(30):
        await add_event(store, aggregate_id=f"aggregate-{number}")

    claims = await asyncio.gather(*(store.claim_batch(4, 30.0) for _ in range(10)))

    claimed = [event.sequence for claim in claims for event in claim]
    assert sorted(claimed) == list(range(1, 31))
