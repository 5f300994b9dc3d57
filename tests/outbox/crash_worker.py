"""The processes of test_crash.py, each a command of this script.

`consumer`: the mock consumer, which is never killed; told so on standard input, it reports its side effects.
`lives URL DB`: forks one process after the other, each of which places orders and dispatches them until it is killed.
"""

import asyncio
import json
import os
import random
import sys
from collections import Counter
from typing import Any

from outbox.config import AppConfig
from outbox.database import SQLiteStore
from outbox.dispatcher import OutboxDispatcher
from outbox.mock_consumer import InMemoryIdempotencyStore, create_app, serve
from outbox.models import EventStatus, compute_idempotency_key
from tests.outbox.support import ORDER


def say(line: str) -> None:
    """One write, so that a kill leaves a line whole or not there."""
    os.write(sys.stdout.fileno(), f"{line}\n".encode())


# --- the consumer ---


async def consume() -> None:
    side_effects: Counter[str] = Counter()
    line: list[list[int]] = []

    async def side_effect(payload: bytes) -> None:
        await asyncio.sleep(random.uniform(0.0, 0.005))  # so that many a kill comes between request and answer
        event: dict[str, Any] = json.loads(payload)
        side_effects[compute_idempotency_key(event)] += 1
        if event["aggregate_id"] == "line":
            line.append([event["data"]["life"], event["data"]["number"]])

    async with serve(create_app(InMemoryIdempotencyStore(side_effect=side_effect))) as url:
        say(url)
        await asyncio.to_thread(sys.stdin.readline)
        say(json.dumps({"side_effects": side_effects, "line": line}))


# --- those who are killed ---


async def live(url: str, db_path: str, life: int, *, until_all_is_delivered: bool) -> None:
    config = AppConfig(
        consumer_endpoint=f"{url}/webhooks",
        poll_interval=0.02,
        request_timeout=0.4,
        lease_seconds=0.5,
        base_backoff=0.01,
        max_delivery_attempts=1000,
    )
    async with SQLiteStore(db_path) as store, OutboxDispatcher(config, store):
        if until_all_is_delivered:
            while (counts := (await store.stats()).counts)[EventStatus.PENDING] or counts[EventStatus.PROCESSING]:
                await store.wait_for_events(0.05)
        else:
            await asyncio.gather(place_orders(store), add_to_the_line(store, life))


async def place_orders(store: SQLiteStore) -> None:
    while True:
        placed = await asyncio.gather(*(store.create_order_with_outbox_event(ORDER) for _ in range(3)))
        for order, _ in placed:
            say(f"placed {order.id}")
        await asyncio.sleep(random.uniform(0.0, 0.02))


async def add_to_the_line(store: SQLiteStore, life: int) -> None:
    number = 0
    while True:
        async with store.transaction() as conn:
            payload = {"life": life, "number": number}
            event = await store.add_event(conn, event_type="line.joined", aggregate_id="line", payload=payload)
            order = (event.id, "line@example.com", "1", "CREATED", "")
            await conn.execute("INSERT INTO orders VALUES (?, ?, ?, ?, ?)", order)
        say(f"placed {event.id}")
        number += 1
        await asyncio.sleep(random.uniform(0.0, 0.02))


def fork_lives(url: str, db_path: str) -> None:
    for life, command in enumerate(sys.stdin):
        child = os.fork()
        if child == 0:
            say(f"born {os.getpid()}")
            try:
                asyncio.run(live(url, db_path, life, until_all_is_delivered=command == "finish\n"))
                os._exit(0)
            finally:
                os._exit(1)
        _, status = os.waitpid(child, 0)
        say(f"dead {os.waitstatus_to_exitcode(status)}")


if __name__ == "__main__":
    if sys.argv[1] == "consumer":
        asyncio.run(consume())
    else:
        fork_lives(*sys.argv[2:])
