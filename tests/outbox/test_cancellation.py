"""A cancelled task leaves both rows or neither, no lock, nothing that still runs, and a store that works."""

import asyncio
import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from outbox.database import SQLiteStore
from outbox.models import OutboxEvent
from tests.outbox.conftest import FakeClock
from tests.outbox.support import (
    ORDER,
    CancelledAt,
    add_event,
    assert_nothing_is_left_running,
    database_thread_is_at_work,
    locked_by_another_process,
    orders_and_events,
    rows,
    wait_until,
    write_lock_is_free,
)

COUNT_TO_A_MILLION = """
    WITH RECURSIVE number (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM number WHERE n < 1000000)
    SELECT max(n) FROM number
"""


async def place_order(store: SQLiteStore) -> None:
    await store.create_order_with_outbox_event(ORDER)


async def place_order_in_a_transaction(store: SQLiteStore) -> None:
    async with store.transaction() as conn:
        number = os.urandom(8).hex()
        await conn.execute(f"INSERT INTO orders VALUES ('{number}', 'ada@example.com', '1', 'CREATED', '2026-01-01')")
        await asyncio.sleep(0)
        await store.add_event(conn, event_type="order.created", aggregate_id=number, payload={})
        async with conn.execute("SELECT count(*) FROM orders") as cursor:
            await cursor.fetchone()


both_ways = pytest.mark.parametrize("place", [place_order, place_order_in_a_transaction])


async def cancel_at(coroutine: Coroutine[Any, Any, None], *suspensions: int, on_waking: bool) -> bool:
    """Run `coroutine` and cancel it at these suspensions; return whether it came that far."""
    driver = CancelledAt(coroutine, set(suspensions), on_waking)

    async def drive() -> None:
        await driver

    await asyncio.gather(asyncio.create_task(drive()), return_exceptions=True)
    return driver.suspended > min(suspensions)


@both_ways
@pytest.mark.parametrize("on_waking", [False, True], ids=["falling asleep", "waking"])
@pytest.mark.parametrize("times", [1, 2, 3])
async def test_a_task_cancelled_at_any_of_its_awaits_leaves_both_rows_or_neither(
    store: SQLiteStore,
    db_path: Path,
    place: Callable[[SQLiteStore], Coroutine[Any, Any, None]],
    on_waking: bool,
    times: int,
) -> None:
    for first in itertools.count():
        reached = await cancel_at(place(store), *range(first, first + times), on_waking=on_waking)

        assert_nothing_is_left_running(db_path)
        orders, events = orders_and_events(db_path)
        await place(store)
        assert orders_and_events(db_path) == (orders + 1, events + 1)
        if not reached:
            break
    assert first >= (1 if place is place_order else 5)


@both_ways
async def test_a_task_cancelled_after_any_number_of_event_loop_steps_leaves_both_rows_or_neither(
    store: SQLiteStore, db_path: Path, place: Callable[[SQLiteStore], Coroutine[Any, Any, None]]
) -> None:
    placed: set[bool] = set()
    for steps in (*range(30), 100, 1_000, 10_000):
        before = orders_and_events(db_path)
        task = asyncio.create_task(place(store))
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

        assert_nothing_is_left_running(db_path)
        placed.add(orders_and_events(db_path) != before)
    await place(store)
    assert False in placed


@both_ways
@pytest.mark.parametrize("times", [1, 2])
async def test_a_task_cancelled_while_another_process_holds_the_write_lock_leaves_both_rows_or_neither(
    store: SQLiteStore, db_path: Path, place: Callable[[SQLiteStore], Coroutine[Any, Any, None]], times: int
) -> None:
    with locked_by_another_process(db_path) as let_go:
        waiting_for_the_lock = asyncio.create_task(place(store))
        waiting_for_the_store = asyncio.create_task(place(store))
        await wait_until(database_thread_is_at_work)
        for _ in range(times):
            waiting_for_the_lock.cancel()
            waiting_for_the_store.cancel()
            await asyncio.sleep(0)
        # The thread is still in BEGIN: whoever left now would leave it to take the lock for nobody.
        assert not waiting_for_the_lock.done()
        let_go()
        await asyncio.gather(waiting_for_the_lock, waiting_for_the_store, return_exceptions=True)

    assert waiting_for_the_lock.cancelled()
    assert waiting_for_the_store.cancelled()
    assert_nothing_is_left_running(db_path)
    await place(store)


@both_ways
async def test_a_task_cancelled_while_begin_waits_in_vain_leaves_no_row(
    store: SQLiteStore,
    db_path: Path,
    place: Callable[[SQLiteStore], Coroutine[Any, Any, None]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("outbox.connection.BUSY_TIMEOUT_SECONDS", 0.05)
    with locked_by_another_process(db_path):
        async with SQLiteStore(db_path) as impatient:
            task = asyncio.create_task(place(impatient))
            await wait_until(database_thread_is_at_work)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert task.cancelled()
            assert not database_thread_is_at_work()
            assert orders_and_events(db_path) == (0, 0)
    await place(store)


@pytest.mark.parametrize("limit", [asyncio.timeout, None], ids=["asyncio.timeout", "asyncio.wait_for"])
@both_ways
async def test_a_deadline_that_passes_while_begin_waits_leaves_both_rows_or_neither(
    store: SQLiteStore,
    db_path: Path,
    place: Callable[[SQLiteStore], Coroutine[Any, Any, None]],
    limit: Callable[[float], Any] | None,
) -> None:
    async def place_in_time() -> None:
        if limit is None:
            await asyncio.wait_for(place(store), 0.01)
        else:
            async with limit(0.01):
                await place(store)

    with locked_by_another_process(db_path) as let_go:
        asyncio.get_running_loop().call_later(0.05, let_go)
        with pytest.raises(TimeoutError):
            await place_in_time()

    assert_nothing_is_left_running(db_path)
    await place(store)


async def test_a_statement_cancelled_in_the_middle_is_waited_for_and_undone(store: SQLiteStore, db_path: Path) -> None:
    async def count_for_long() -> None:
        async with store.transaction() as conn:
            await store.add_event(conn, event_type="test.happened", aggregate_id="a", payload={})
            await conn.execute(COUNT_TO_A_MILLION)

    task = asyncio.create_task(count_for_long())
    await wait_until(database_thread_is_at_work)
    await asyncio.sleep(0.02)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

    assert task.cancelled()
    assert_nothing_is_left_running(db_path)
    assert orders_and_events(db_path) == (0, 0)


async def test_a_statement_given_up_after_a_deadline_does_not_end_the_transaction(
    store: SQLiteStore, db_path: Path
) -> None:
    async with store.transaction() as conn:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(conn.execute_fetchall(COUNT_TO_A_MILLION), 0.01)
        await store.add_event(conn, event_type="test.happened", aggregate_id="a", payload={})

    assert orders_and_events(db_path) == (0, 1)


async def test_an_operation_cancelled_while_it_waits_never_begins_and_those_behind_it_do(
    store: SQLiteStore, db_path: Path
) -> None:
    async with store.transaction():
        cancelled = [asyncio.create_task(place(store)) for place in (place_order, place_order_in_a_transaction)]
        patient = [asyncio.create_task(place(store)) for place in (place_order, place_order_in_a_transaction)]
        await asyncio.sleep(0)
        for task in cancelled:
            task.cancel()
        # They end while the database is still busy: what never began needs no waiting for.
        await asyncio.wait(cancelled)

    await asyncio.gather(*patient)
    assert orders_and_events(db_path) == (2, 2)


@pytest.mark.parametrize("on_waking", [False, True], ids=["falling asleep", "waking"])
@pytest.mark.parametrize("times", [1, 2])
async def test_a_claim_cancelled_at_any_of_its_awaits_gives_back_what_it_had_claimed(
    store: SQLiteStore, db_path: Path, clock: FakeClock, on_waking: bool, times: int
) -> None:
    await add_event(store)
    # A row that cannot be decoded, at the head of each claim, makes the claim go to the database a second time.
    broken = "INSERT INTO outbox (id, event_type, payload_json, idempotency_key, created_at, updated_at) VALUES "

    async def claim() -> None:
        await store.claim_batch(10, 30.0)

    for first in itertools.count():
        rows(db_path, f"{broken} ('broken-{first}', 'a b', '{{}}', 'key-{first}', '', '')")
        reached = await cancel_at(claim(), *range(first, first + times), on_waking=on_waking)
        if not reached:
            break
        assert_no_claim_is_left(db_path)
    assert first >= 2
    assert rows(db_path, "SELECT status FROM outbox WHERE event_type = 'test.happened'") == [("PROCESSING",)]


def assert_no_claim_is_left(db_path: Path) -> None:
    assert rows(db_path, "SELECT count(*) FROM outbox WHERE status = 'PROCESSING'") == [(0,)]
    assert rows(db_path, "SELECT status, retry_count FROM outbox WHERE event_type = 'test.happened'") == [
        ("PENDING", 0)
    ]


async def test_a_claim_cancelled_while_it_waits_for_a_transaction_does_not_wait_for_its_end(
    store: SQLiteStore,
) -> None:
    async with store.transaction():
        claim = asyncio.create_task(store.claim_batch(10, 30.0))
        await asyncio.sleep(0)
        claim.cancel()
        await asyncio.wait_for(asyncio.wait([claim]), 5.0)
        assert claim.cancelled()


async def test_a_claim_cancelled_while_the_store_closes_ends_cancelled(db_path: Path) -> None:
    async with SQLiteStore(db_path) as store:
        await add_event(store)
        with locked_by_another_process(db_path) as let_go:
            claim = asyncio.create_task(store.claim_batch(10, 30.0))
            await wait_until(database_thread_is_at_work)
            closing = asyncio.create_task(store.__aexit__(None, None, None))
            await asyncio.sleep(0)
            claim.cancel()
            let_go()
        await closing
        await asyncio.wait([claim])

    assert claim.cancelled()
    assert write_lock_is_free(db_path)


async def test_a_settlement_that_was_called_is_carried_out_although_its_caller_is_cancelled(
    store: SQLiteStore, db_path: Path
) -> None:
    settlements: list[Callable[[OutboxEvent], Coroutine[Any, Any, object]]] = [
        store.mark_event_published,
        lambda event: store.release(event, 0.0),
        lambda event: store.record_event_failure_or_quarantine(event, "HTTP 500", 3, 1.0),
        lambda event: store.record_event_failure_or_quarantine(event, "HTTP 400", 3, None),
    ]
    for number, settle in enumerate(settlements):
        await add_event(store, aggregate_id=str(number))
        [event] = await store.claim_batch(1, 30.0)
        async with store.transaction():
            task = asyncio.create_task(settle(event))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.sleep(0)
            assert not task.done()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()
        await store.claim_batch(1, 30.0)  # the released one, out of the way

    assert rows(db_path, "SELECT status FROM outbox ORDER BY sequence") == [
        ("PUBLISHED",),
        ("PROCESSING",),
        ("PENDING",),
        ("DEAD_LETTER",),
    ]


@pytest.mark.parametrize("on_waking", [False, True], ids=["falling asleep", "waking"])
async def test_opening_and_closing_cancelled_at_any_await_leave_no_thread_and_no_lock(
    db_path: Path, on_waking: bool
) -> None:
    async def open_and_close() -> None:
        async with SQLiteStore(db_path):
            pass

    async with SQLiteStore(db_path):
        pass
    for first in itertools.count():
        reached = await cancel_at(open_and_close(), first, on_waking=on_waking)

        await wait_until(lambda: not database_threads())
        assert_nothing_is_left_running(db_path)
        if not reached:
            break
    assert first >= 3


def database_threads() -> list[str]:
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if "outbox-database" in name or "_connection_worker_thread" in name]


# --- the end of the event loop ---

_LEAVE_THE_LOOP_WITH_WORK_UNDER_WAY = """
import asyncio, sys
from outbox.database import SQLiteStore
from tests.outbox.support import ORDER
from tests.outbox.test_cancellation import COUNT_TO_A_MILLION

async def transaction(store, number):
    async with store.transaction() as conn:
        await conn.execute("INSERT INTO orders VALUES (?, 'a@b', '1', 'CREATED', '')", (f"order-{number}",))
        await conn.execute("SELECT 1" if number else COUNT_TO_A_MILLION)
        await store.add_event(conn, event_type="order.created", aggregate_id=str(number), payload={})

async def own_the_store(path, is_open):
    async with SQLiteStore(path) as store:
        is_open.set()
        tasks = [asyncio.create_task(store.create_order_with_outbox_event(ORDER)) for _ in range(20)]
        tasks += [asyncio.create_task(transaction(store, number)) for number in range(3)]
        tasks += [asyncio.create_task(store.claim_batch(5, 30.0)) for _ in range(3)]
        tasks += [asyncio.create_task(store.wait_for_events(60.0))]
        await asyncio.gather(*tasks)

async def main(path, steps):
    is_open = asyncio.Event()
    task = asyncio.create_task(own_the_store(path, is_open))
    await is_open.wait()
    for _ in range(steps):
        await asyncio.sleep(0)
    assert not task.done()
    print("leaving", flush=True)

asyncio.run(main(sys.argv[1], int(sys.argv[2])))
"""


@pytest.mark.parametrize("locked", [False, True], ids=["free", "locked"])
@pytest.mark.parametrize("steps", [0, 20, 500, 5_000])
def test_a_loop_that_ends_with_operations_under_way_leaves_nothing_half_done_and_the_process_exits(
    db_path: Path, steps: int, locked: bool
) -> None:
    async def create() -> None:
        async with SQLiteStore(db_path):
            pass

    asyncio.run(create())
    command = [sys.executable, "-W", "error", "-c", _LEAVE_THE_LOOP_WITH_WORK_UNDER_WAY, str(db_path), str(steps)]
    with ExitStack() as stack:
        let_go = stack.enter_context(locked_by_another_process(db_path)) if locked else lambda: None
        process = stack.enter_context(
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "leaving\n"
        let_go()
        _, errors = process.communicate(timeout=30)

    assert errors == ""
    assert process.returncode == 0
    orders, events = orders_and_events(db_path)
    assert orders == events
    assert rows(db_path, "SELECT count(*) FROM outbox WHERE status = 'PROCESSING' AND retry_count > 0") == [(0,)]
