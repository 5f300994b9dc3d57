"""Order and event commit together or not at all, whatever raises (Section 4.1)."""

import asyncio
import sqlite3
from datetime import UTC, datetime
from pathlib import Path

import aiosqlite
import pytest

from outbox.database import SQLiteStore
from outbox.models import DuplicateEventError
from tests.outbox.support import (
    ORDER,
    add_event,
    assert_nothing_is_left_running,
    orders_and_events,
    rows,
    write_lock_is_free,
)

INSERT_ORDER = "INSERT INTO orders VALUES ('order-1', 'ada@example.com', '1', 'CREATED', '2026-01-01')"


async def place_order(store: SQLiteStore, conn: aiosqlite.Connection) -> None:
    await conn.execute(INSERT_ORDER)
    await store.add_event(conn, event_type="order.created", aggregate_id="order-1", payload={})


FAILURES: list[BaseException] = [
    RuntimeError("between the inserts"),
    sqlite3.OperationalError("between the inserts"),
    MemoryError("between the inserts"),
    KeyboardInterrupt("between the inserts"),
    SystemExit("between the inserts"),
    GeneratorExit("between the inserts"),
    asyncio.CancelledError("between the inserts"),
]
each_kind_of_failure = pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: type(failure).__name__)


@each_kind_of_failure
async def test_a_failure_between_the_two_inserts_leaves_neither_row(
    store: SQLiteStore, db_path: Path, failure: BaseException
) -> None:
    def inject() -> None:
        raise failure

    with pytest.raises(type(failure), match="between the inserts"):
        await store.create_order_with_outbox_event(ORDER, failure_injector=inject)

    assert orders_and_events(db_path) == (0, 0)
    assert_nothing_is_left_running(db_path)
    await store.create_order_with_outbox_event(ORDER)
    assert orders_and_events(db_path) == (1, 1)


@each_kind_of_failure
async def test_a_failure_in_a_transaction_of_the_callers_own_leaves_neither_row(
    store: SQLiteStore, db_path: Path, failure: BaseException
) -> None:
    async def work() -> None:
        async with store.transaction() as conn:
            await place_order(store, conn)
            raise failure

    with pytest.raises(type(failure), match="between the inserts"):
        await work()

    assert orders_and_events(db_path) == (0, 0)
    assert_nothing_is_left_running(db_path)
    await store.create_order_with_outbox_event(ORDER)
    assert orders_and_events(db_path) == (1, 1)


@pytest.mark.parametrize("second_of_its_kind", ["orders (customer_email)", "outbox (event_type)"])
async def test_a_unique_violation_of_either_row_leaves_neither(
    store: SQLiteStore, db_path: Path, second_of_its_kind: str
) -> None:
    rows(db_path, f"CREATE UNIQUE INDEX only_one ON {second_of_its_kind}")
    await store.create_order_with_outbox_event(ORDER)

    with pytest.raises(sqlite3.IntegrityError, match="UNIQUE"):
        await store.create_order_with_outbox_event(ORDER)

    assert orders_and_events(db_path) == (1, 1)
    assert_nothing_is_left_running(db_path)


async def test_an_idempotency_key_that_is_known_already_undoes_the_order_too(
    store: SQLiteStore, db_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outbox.database.new_id", lambda now: "the-same-id")
    await store.create_order_with_outbox_event(ORDER)
    rows(db_path, "DELETE FROM orders")
    rows(db_path, "UPDATE outbox SET id = 'another-id'")

    with pytest.raises(DuplicateEventError, match="occurrence_id"):
        await store.create_order_with_outbox_event(ORDER)

    assert rows(db_path, "SELECT count(*) FROM orders") == [(0,)]
    assert rows(db_path, "SELECT id FROM outbox") == [("another-id",)]
    assert write_lock_is_free(db_path)


async def test_a_transaction_goes_on_without_an_event_that_it_has_already(store: SQLiteStore, db_path: Path) -> None:
    await add_event(store, number=1)

    async with store.transaction() as conn:
        await conn.execute(INSERT_ORDER)
        with pytest.raises(DuplicateEventError):
            await store.add_event(conn, event_type="test.happened", aggregate_id="aggregate-1", payload={"number": 1})
        await store.add_event(
            conn, event_type="test.happened", aggregate_id="aggregate-1", payload={"number": 1}, occurrence_id="second"
        )

    assert orders_and_events(db_path) == (1, 2)


async def test_a_trigger_that_rolls_back_inside_a_transaction_leaves_neither_row(
    store: SQLiteStore, db_path: Path
) -> None:
    rows(db_path, "CREATE TRIGGER refuse BEFORE INSERT ON outbox BEGIN SELECT RAISE(ROLLBACK, 'all of it'); END")

    async def work() -> None:
        async with store.transaction() as conn:
            await place_order(store, conn)

    with pytest.raises(sqlite3.IntegrityError, match="all of it"):
        await work()

    assert orders_and_events(db_path) == (0, 0)
    assert_nothing_is_left_running(db_path)


async def test_a_transaction_whose_commit_fails_leaves_neither_row_and_names_the_file(
    store: SQLiteStore, db_path: Path
) -> None:
    rows(db_path, "CREATE TABLE parent (id PRIMARY KEY)")
    rows(db_path, "CREATE TABLE child (parent REFERENCES parent (id) DEFERRABLE INITIALLY DEFERRED)")

    async def work() -> None:
        async with store.transaction() as conn:
            await place_order(store, conn)
            await conn.execute("INSERT INTO child VALUES ('nobody')")

    with pytest.raises(sqlite3.IntegrityError, match=rf"{db_path}: FOREIGN KEY constraint failed"):
        await work()

    assert orders_and_events(db_path) == (0, 0)
    assert_nothing_is_left_running(db_path)
    await store.create_order_with_outbox_event(ORDER)


async def test_a_statement_whose_rows_were_not_all_read_does_not_keep_the_transaction_from_its_commit(
    store: SQLiteStore, db_path: Path
) -> None:
    async with store.transaction() as conn:
        left_open = await conn.execute(f"{INSERT_ORDER}, ('order-2', 'a@b', '1', 'CREATED', '') RETURNING id")
        assert await left_open.fetchone() is not None

    assert rows(db_path, "SELECT count(*) FROM orders") == [(2,)]


@pytest.mark.parametrize("ending", ["COMMIT", "ROLLBACK"])
async def test_a_transaction_that_its_block_ended_by_hand_is_an_error(
    store: SQLiteStore, db_path: Path, ending: str
) -> None:
    with pytest.raises(RuntimeError, match="leave COMMIT and ROLLBACK to the block's end"):
        async with store.transaction() as conn:
            await conn.execute(ending)

    assert_nothing_is_left_running(db_path)
    await add_event(store)


async def test_an_event_cannot_be_added_outside_of_a_transaction(store: SQLiteStore, db_path: Path) -> None:
    async with store.transaction() as conn:
        pass

    with pytest.raises(RuntimeError, match="needs an open transaction"):
        await store.add_event(conn, event_type="test.happened", aggregate_id="aggregate-1", payload={})

    assert orders_and_events(db_path) == (0, 0)


async def test_a_refused_event_leaves_the_transaction_as_it_was(store: SQLiteStore, db_path: Path) -> None:
    async with store.transaction() as conn:
        await conn.execute(INSERT_ORDER)
        with pytest.raises(ValueError, match="event_type"):
            await store.add_event(conn, event_type="two words", aggregate_id="order-1", payload={})
        with pytest.raises(TypeError, match=r"data\.tags is a set"):
            await store.add_event(conn, event_type="order.created", aggregate_id="order-1", payload={"tags": {1}})
        await store.add_event(conn, event_type="order.created", aggregate_id="order-1", payload={})

    assert orders_and_events(db_path) == (1, 1)


# --- one store, many coroutines ---


async def test_transactions_never_interleave(store: SQLiteStore, db_path: Path) -> None:
    steps: list[tuple[str, int]] = []

    async def work(number: int) -> None:
        async with store.transaction() as conn:
            steps.append(("begins", number))
            for _ in range(3):
                await conn.execute("SELECT 1")
                await asyncio.sleep(0)
            await store.add_event(conn, event_type="test.happened", aggregate_id="a", payload={"number": number})
            steps.append(("ends", number))

    await asyncio.gather(*(work(number) for number in range(10)))

    assert steps == [(step, number) for number in range(10) for step in ("begins", "ends")]
    assert rows(db_path, "SELECT count(*) FROM outbox") == [(10,)]


@pytest.mark.parametrize("operation", ["create_order", "claim_batch", "stats", "transaction"])
async def test_a_store_operation_inside_a_transaction_of_the_same_task_is_an_error(
    store: SQLiteStore, db_path: Path, operation: str
) -> None:
    async def call() -> None:
        match operation:
            case "create_order":
                await store.create_order_with_outbox_event(ORDER)
            case "claim_batch":
                await store.claim_batch(1, 30.0)
            case "stats":
                await store.stats()
            case _:
                async with store.transaction():
                    pass

    async with store.transaction():
        with pytest.raises(RuntimeError, match="would wait for its own end"):
            await call()

    await call()
    assert write_lock_is_free(db_path)


async def test_a_store_operation_of_another_task_waits_for_the_transaction(store: SQLiteStore, db_path: Path) -> None:
    async with store.transaction():
        order = asyncio.create_task(store.create_order_with_outbox_event(ORDER))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not order.done()

    await order
    assert orders_and_events(db_path) == (1, 1)


async def test_closing_waits_for_what_is_under_way_and_refuses_what_comes_later(db_path: Path) -> None:
    inside, go_on = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        async with store.transaction() as conn:
            inside.set()
            await go_on.wait()
            await store.add_event(conn, event_type="test.happened", aggregate_id="a", payload={})

    async with SQLiteStore(db_path) as store:
        transaction = asyncio.create_task(work())
        await inside.wait()
        order = asyncio.create_task(store.create_order_with_outbox_event(ORDER))
        await asyncio.sleep(0)
        asyncio.get_running_loop().call_soon(go_on.set)

    await asyncio.gather(transaction, order)
    assert orders_and_events(db_path) == (1, 2)
    with pytest.raises(RuntimeError, match=rf"{db_path} is not open"):
        await store.stats()


async def test_an_open_store_cannot_be_opened_again(store: SQLiteStore, db_path: Path) -> None:
    with pytest.raises(RuntimeError, match=rf"{db_path} is open already"):
        await store.__aenter__()

    await add_event(store)


async def test_a_closed_store_can_be_opened_again(db_path: Path) -> None:
    store = SQLiteStore(db_path)
    for number in range(2):
        async with store:
            await add_event(store, number=number)

    assert rows(db_path, "SELECT count(*) FROM outbox") == [(2,)]


# --- time as text ---


async def test_timestamps_have_one_width_so_that_text_order_is_time_order(db_path: Path) -> None:
    moments = [datetime(2026, 1, 1, 0, 0, 0, microsecond, UTC) for microsecond in (0, 1, 500_000)]
    for number, moment in enumerate(moments):
        async with SQLiteStore(db_path, clock=lambda moment=moment: moment) as store:  # type: ignore[misc]
            await add_event(store, aggregate_id=str(number))
            await store.create_order_with_outbox_event(ORDER)

    columns = rows(db_path, "SELECT created_at, updated_at, next_attempt_at FROM outbox ORDER BY sequence")
    assert {len(text) for row in columns for text in row} == {len("2026-01-01T00:00:00.000000+00:00")}
    assert columns == sorted(columns)
    assert rows(db_path, "SELECT DISTINCT length(created_at) FROM orders") == [(32,)]
