"""Stopping: by stop(), by SIGTERM, by a cancellation anywhere, by the end of the event loop (Section 4.2).

Whatever ends the dispatcher, nothing stays leased, no attempt is counted that was not made, nothing is left running.
"""

import asyncio
import signal
import subprocess
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from outbox.config import AppConfig
from outbox.database import SQLiteStore
from outbox.dispatcher import OutboxDispatcher
from tests.outbox.conftest import FakeClock
from tests.outbox.misbehaving import Exchange, Held, RawServer, answering, head, raw_server
from tests.outbox.support import CancelledAt, add_event, rows, wait_until

REPOSITORY = Path(__file__).parents[2]


def statuses(db_path: Path) -> set[tuple[str, int]]:
    return set(rows(db_path, "SELECT status, retry_count FROM outbox"))


def leased(db_path: Path) -> int:
    [(count,)] = rows(db_path, "SELECT count(*) FROM outbox WHERE status = 'PROCESSING' OR lease_token IS NOT NULL")
    return int(count)


# --- stop() ---


async def test_stop_waits_for_the_deliveries_under_way_and_claims_nothing_more(
    store: SQLiteStore, db_path: Path
) -> None:
    held = Held()
    async with raw_server(held) as server:
        for number in range(8):
            await add_event(store, f"a-{number}")
        dispatcher = OutboxDispatcher(AppConfig(consumer_endpoint=server.url, max_in_flight=4), store)
        running = asyncio.create_task(dispatcher.run())
        await wait_until(lambda: held.arrived == 4)
        stopping = asyncio.create_task(dispatcher.stop())
        await asyncio.sleep(0.05)
        assert not stopping.done()
        held.let_go.set()
        await stopping
        await running
        assert held.arrived == 4
    assert rows(db_path, "SELECT status, count(*) FROM outbox GROUP BY status") == [("PENDING", 4), ("PUBLISHED", 4)]
    assert leased(db_path) == 0


async def test_stop_takes_request_timeout_at_the_longest(store: SQLiteStore, db_path: Path) -> None:
    async with raw_server(Held()) as server:
        await add_event(store)
        dispatcher = OutboxDispatcher(AppConfig(consumer_endpoint=server.url, request_timeout=0.3), store)
        async with asyncio.timeout(10):
            async with dispatcher:
                await wait_until(lambda: len(server.requests) == 1)
    assert statuses(db_path) == {("PENDING", 1)}
    assert leased(db_path) == 0


async def test_stop_before_the_loop_has_begun_ends_it(store: SQLiteStore, config: AppConfig) -> None:
    dispatcher = OutboxDispatcher(config, store)
    running = asyncio.create_task(dispatcher.run())
    await dispatcher.stop()
    async with asyncio.timeout(5):
        await running


async def test_stop_wakes_a_dispatcher_that_would_not_poll_for_an_hour(store: SQLiteStore, config: AppConfig) -> None:
    dispatcher = OutboxDispatcher(config.model_copy(update={"poll_interval": 3600.0}), store)
    async with asyncio.timeout(5):
        running = asyncio.create_task(dispatcher.run())
        await asyncio.sleep(0.05)
        await dispatcher.stop()
        await running


async def test_stop_twice_and_stop_without_run_are_harmless(store: SQLiteStore, config: AppConfig) -> None:
    dispatcher = OutboxDispatcher(config, store)
    async with asyncio.timeout(5):
        await dispatcher.stop()
        running = asyncio.create_task(dispatcher.run())
        await asyncio.gather(dispatcher.stop(), dispatcher.stop())
        await dispatcher.stop()
        await running


async def test_it_runs_again_after_stop(store: SQLiteStore, config: AppConfig, db_path: Path) -> None:
    dispatcher = OutboxDispatcher(config, store)
    for number in range(3):
        await add_event(store, f"a-{number}")
        async with dispatcher:
            await wait_until(lambda: statuses(db_path) == {("PUBLISHED", 0)})
        await dispatcher.stop()


async def test_running_twice_at_once_is_refused_and_the_first_goes_on(
    store: SQLiteStore, config: AppConfig, db_path: Path
) -> None:
    dispatcher = OutboxDispatcher(config, store)
    async with dispatcher:
        with pytest.raises(RuntimeError, match="runs already"):
            await dispatcher.run()
        with pytest.raises(RuntimeError, match="runs already"):
            await dispatcher.__aenter__()
        await add_event(store)
        await wait_until(lambda: statuses(db_path) == {("PUBLISHED", 0)})


async def fail_inside(dispatcher: OutboxDispatcher, server: RawServer) -> None:
    async with dispatcher:
        await wait_until(lambda: len(server.requests) == 1)
        raise LookupError("in the block")


async def test_a_block_that_raises_stops_the_dispatcher_and_raises_the_same(store: SQLiteStore, db_path: Path) -> None:
    async with raw_server(answering("200 OK")) as server:
        await add_event(store)
        with pytest.raises(LookupError, match="in the block"):
            await fail_inside(OutboxDispatcher(AppConfig(consumer_endpoint=server.url), store), server)
    assert statuses(db_path) == {("PUBLISHED", 0)}
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_block_that_is_cancelled_drains_and_one_cancelled_again_releases(
    store: SQLiteStore, db_path: Path
) -> None:
    async def block(dispatcher: OutboxDispatcher) -> None:
        async with dispatcher:
            await asyncio.Event().wait()

    held = Held()
    async with raw_server(held) as server:
        await add_event(store)
        task = asyncio.create_task(block(OutboxDispatcher(AppConfig(consumer_endpoint=server.url), store)))
        await wait_until(lambda: held.arrived == 1)
        task.cancel()
        await asyncio.sleep(0.05)
        assert not task.done()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert statuses(db_path) == {("PENDING", 0)}
    assert leased(db_path) == 0


async def test_entering_the_block_can_be_cancelled(store: SQLiteStore) -> None:
    dispatcher = OutboxDispatcher(AppConfig(consumer_endpoint="http://127.0.0.1:9/"), store)
    entering = asyncio.create_task(dispatcher.__aenter__())
    await asyncio.sleep(0)
    entering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await entering
    assert asyncio.all_tasks() == {asyncio.current_task()}
    async with dispatcher:
        pass


# --- cancelled ---


async def test_a_cancelled_run_releases_what_was_not_answered_and_counts_no_attempt(
    store: SQLiteStore, db_path: Path
) -> None:
    held = Held()
    async with raw_server(held) as server:
        for number in range(10):
            await add_event(store, f"a-{number}")
        running = asyncio.create_task(OutboxDispatcher(AppConfig(consumer_endpoint=server.url), store).run())
        await wait_until(lambda: held.arrived == 10)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    assert statuses(db_path) == {("PENDING", 0)}
    assert leased(db_path) == 0
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.parametrize("way", ["run", "process_batch"])
@pytest.mark.parametrize("again", [False, True], ids=["once", "twice"])
@pytest.mark.parametrize("suspension", range(8))
async def test_a_cancellation_at_any_await_of_the_dispatcher_leaves_nothing_leased(
    store: SQLiteStore, db_path: Path, way: str, again: bool, suspension: int
) -> None:
    """Suspension 0 is the claim; the deliveries that it starts have not run a step when the next one is reached."""
    async with raw_server(answering("200 OK", b"{}")) as server:
        for number in range(3):
            await add_event(store, f"a-{number}")
        dispatcher = OutboxDispatcher(AppConfig(consumer_endpoint=server.url, poll_interval=0.01), store)
        coroutine = dispatcher.run() if way == "run" else dispatcher.process_batch()
        cancelled_at = CancelledAt(coroutine, {suspension}, on_waking=False)

        async def run() -> None:
            await cancelled_at

        task = asyncio.create_task(run())
        if again:
            await wait_until(lambda: cancelled_at.suspended > suspension or task.done())
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            task.cancel()
        await asyncio.wait([task], timeout=10)
        assert task.done()
        assert task.cancelled() or way == "process_batch"
        assert leased(db_path) == 0
        assert statuses(db_path) <= {("PENDING", 0), ("PUBLISHED", 0)}
        assert asyncio.all_tasks() - {asyncio.current_task()} == _of_the_server()
        # The store and the dispatcher still work.
        await dispatcher.process_batch()
        assert statuses(db_path) == {("PUBLISHED", 0)}


def _of_the_server() -> set[asyncio.Task[Any]]:
    return {task for task in asyncio.all_tasks() if "misbehaving" in str(task.get_coro()) or "connected" in repr(task)}


@pytest.mark.parametrize("way", ["run", "process_batch"])
async def test_a_cancellation_after_any_number_of_loop_steps_leaves_nothing_leased(
    store: SQLiteStore, db_path: Path, clock: FakeClock, way: str
) -> None:
    async def slowly(exchange: Exchange) -> None:
        await exchange.send(head("200 OK", "Content-Length: 4") + b"ab")
        await asyncio.sleep(0)
        await exchange.send(b"cd")

    async with raw_server(slowly) as server:
        dispatcher = OutboxDispatcher(AppConfig(consumer_endpoint=server.url, poll_interval=0.01), store)
        for steps in (*range(12), *range(12, 120, 6), *range(120, 1200, 90)):
            await add_event(store, f"a-{steps}")
            task = asyncio.create_task(dispatcher.run() if way == "run" else dispatcher.process_batch())
            for _ in range(steps):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            assert leased(db_path) == 0, steps
            assert statuses(db_path) <= {("PENDING", 0), ("PUBLISHED", 0)}, steps
        while await dispatcher.process_batch():
            pass
    assert statuses(db_path) == {("PUBLISHED", 0)}


@pytest.mark.parametrize("moment", ["before the answer", "after the status", "idle"])
def test_the_end_of_the_event_loop_leaves_nothing_leased(db_path: Path, clock: FakeClock, moment: str) -> None:
    """asyncio.run() cancels every task at once: the loop of the dispatcher, each delivery, each settlement."""

    async def answer(exchange: Exchange) -> None:
        if moment != "before the answer":
            await exchange.send(head("200 OK", "Content-Length: 4") + b"ab")
        await exchange.hang()

    async def main() -> None:
        store = await opened.enter_async_context(SQLiteStore(db_path, clock=clock))
        server = await opened.enter_async_context(raw_server(answer))
        if moment != "idle":
            for number in range(5):
                await add_event(store, f"a-{number}")
        task = asyncio.create_task(OutboxDispatcher(AppConfig(consumer_endpoint=server.url), store).run())
        background.append(task)
        if moment != "idle":
            await wait_until(lambda: len(server.requests) == 5)
        await asyncio.sleep(0.05)

    background: list[asyncio.Task[None]] = []
    opened = AsyncExitStack()  # of what has to outlive the end of every task
    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(main())
        asyncio.runners._cancel_all_tasks(loop)  # type: ignore[attr-defined]
        loop.run_until_complete(opened.aclose())
    finally:
        loop.close()
    assert background[0].cancelled()
    assert leased(db_path) == 0
    expected = {"before the answer": {("PENDING", 0)}, "after the status": {("PUBLISHED", 0)}, "idle": set()}
    assert statuses(db_path) == expected[moment]


# --- SIGTERM ---

DISPATCH = """
import asyncio, signal, sys
from outbox.config import AppConfig
from outbox.database import SQLiteStore
from outbox.dispatcher import OutboxDispatcher

async def main():
    config = AppConfig(db_path=sys.argv[1], consumer_endpoint=sys.argv[2], max_in_flight=20, batch_size=20,
                       request_timeout=1.0)
    async with SQLiteStore(config.db_path) as store:
        dispatcher = OutboxDispatcher(config, store)
        stopping = []
        asyncio.get_running_loop().add_signal_handler(
            signal.SIGTERM, lambda: stopping.append(asyncio.create_task(dispatcher.stop()))
        )
        await dispatcher.run()
        await asyncio.gather(*stopping)

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGTERM handlers")
@pytest.mark.parametrize("signals", [1, 3])
async def test_sigterm_with_20_deliveries_in_flight_settles_each_and_leaves_silently(
    db_path: Path, signals: int
) -> None:
    let_go = asyncio.Event()
    answered = 0

    async def half_of_them_hang(exchange: Exchange) -> None:
        nonlocal answered
        await let_go.wait()
        answered += 1
        if answered > 10:
            await exchange.hang()
        await exchange.send(head("200 OK", "Content-Length: 2") + b"{}")

    async with SQLiteStore(db_path) as store, raw_server(half_of_them_hang) as server:
        for number in range(25):
            await add_event(store, f"a-{number}")
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-X", "dev", "-c", DISPATCH, str(db_path), server.url),
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        await wait_until(lambda: len(server.requests) == 20)
        for _ in range(signals):
            process.send_signal(signal.SIGTERM)
        let_go.set()
        output, _ = await asyncio.wait_for(process.communicate(), 30)

    assert process.returncode == 0, output
    for complaint in (b"destroyed", b"never awaited", b"never retrieved", b"unclosed", b"Traceback", b"Warning"):
        assert complaint not in output, output
    assert leased(db_path) == 0
    assert dict(rows(db_path, "SELECT status || retry_count, count(*) FROM outbox GROUP BY 1")) == {
        "PUBLISHED0": 10,
        "PENDING1": 10,
        "PENDING0": 5,
    }
