"""Whatever moment a process is killed at, no event is lost and no side effect runs twice (Section 4)."""

import asyncio
import json
import os
import random
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from outbox.database import SQLiteStore
from tests.outbox.support import rows, write_lock_is_free

KILLS = 36


class Worker:
    """A process of crash_worker.py, spoken to by lines."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    def say(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n".encode())

    async def hear(self) -> str:
        assert self._process.stdout is not None
        async with asyncio.timeout(30):
            line = (await self._process.stdout.readline()).decode()
        assert line.endswith("\n"), "the worker ended early"
        return line.removesuffix("\n")


@asynccontextmanager
async def worker(*arguments: str) -> AsyncIterator[Worker]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.outbox.crash_worker",
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=2**24,
    )
    try:
        yield Worker(process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        await asyncio.wait_for(process.wait(), 30)


async def test_a_process_killed_again_and_again_delivers_every_event_and_no_side_effect_runs_twice(
    db_path: Path,
) -> None:
    chance = random.Random(1)
    acknowledged: set[str] = set()
    killed_while_delivering = 0
    async with SQLiteStore(db_path):
        pass

    async with worker("consumer") as consumer:
        async with worker("lives", await consumer.hear(), str(db_path)) as lives:
            for _ in range(KILLS):
                lives.say("live")
                child = int((await lives.hear()).removeprefix("born "))
                for _ in range(chance.randrange(10)):
                    acknowledged.add((await lives.hear()).removeprefix("placed "))
                await asyncio.sleep(chance.uniform(0.0, 0.03))
                os.kill(child, signal.SIGKILL)
                while not (last_words := await lives.hear()).startswith("dead "):
                    acknowledged.add(last_words.removeprefix("placed "))
                assert last_words == f"dead {-signal.SIGKILL}"
                assert write_lock_is_free(db_path)
                under_way = rows(db_path, "SELECT count(*) FROM outbox WHERE status = 'PROCESSING'")
                killed_while_delivering += under_way != [(0,)]

            lives.say("finish")
            assert (await lives.hear()).startswith("born ")
            assert await lives.hear() == "dead 0"
        consumer.say("report")
        report = json.loads(await consumer.hear())

    orders = {order_id for (order_id,) in rows(db_path, "SELECT id FROM orders")}
    events = {
        aggregate if aggregate != "line" else event
        for event, aggregate in rows(db_path, "SELECT id, aggregate_id FROM outbox")
    }
    assert acknowledged <= orders
    assert orders == events
    assert rows(db_path, "SELECT DISTINCT status FROM outbox") == [("PUBLISHED",)]
    keys = {key for (key,) in rows(db_path, "SELECT idempotency_key FROM outbox")}
    assert report["side_effects"] == dict.fromkeys(keys, 1)
    assert report["line"] == sorted(report["line"])
    assert rows(db_path, "PRAGMA integrity_check") == [("ok",)]
    assert len(acknowledged) > KILLS
    assert killed_while_delivering > 5
    assert rows(db_path, "SELECT max(retry_count) FROM outbox") > [(0,)]
