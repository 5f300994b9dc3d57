"""The demonstration: the article's four cycles over real HTTP, then the replay of the dead letter.

    python outbox/main.py                 on a database in a temporary folder
    python outbox/main.py --db demo.db    on one that is kept

Article: Section 6. The exit status is 0 only if everything that the closing table lists held.
"""

import argparse
import asyncio
import sqlite3
import sys
import tempfile
from pathlib import Path
from typing import Any

if not __package__:  # started as a file: Python put this folder on the path, and the package is looked for beside it
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import httpx

from outbox.config import AppConfig, configure_logging
from outbox.database import SQLiteStore
from outbox.dispatcher import OutboxDispatcher
from outbox.mock_consumer import InMemoryIdempotencyStore, create_app, serve
from outbox.models import EventStatus, OrderCreate, OutboxEvent

ORDER = OrderCreate.model_validate({"customer_email": "ada@example.com", "amount": "149.90"})
PATIENCE_SECONDS = 10.0


class Demo:
    """The cycles, in the order of the article, and what they were seen to do."""

    def __init__(self, db_path: Path, store: SQLiteStore, consumer: InMemoryIdempotencyStore, url: str) -> None:
        self._db_path = db_path
        self._store = store
        self._consumer = consumer
        self._url = url
        self._config = AppConfig(db_path=db_path, consumer_endpoint=url, base_backoff=0.05, poll_interval=0.01)
        self._checks: list[tuple[str, bool]] = []

    async def run(self) -> bool:
        """Run the cycles, print the closing table, and return whether every check held."""
        first = await self._cycle_1_atomic_write()
        await self._cycle_2_delivery(first)
        poison = await self._cycle_3_dead_letter()
        await self._cycle_4_deduplication(first)
        await self._replay(poison)
        return self._closing_table()

    async def _cycle_1_atomic_write(self) -> OutboxEvent:
        heading("CYCLE 1: ATOMIC TRANSACTION (ORDERS + OUTBOX)")
        before = self._rows("SELECT (SELECT count(*) FROM orders), (SELECT count(*) FROM outbox)")
        order, event = await self._store.create_order_with_outbox_event(ORDER)
        both = self._rows("SELECT orders.id, outbox.id FROM orders JOIN outbox ON aggregate_id = orders.id")
        self._check("order and event are committed together", (order.id, event.id) in both)

        def fail() -> None:
            raise RuntimeError("injected between the two inserts")

        try:
            await self._store.create_order_with_outbox_event(ORDER, failure_injector=fail)
        except RuntimeError as error:
            print(f"rolled back: {error}")
        after = self._rows("SELECT (SELECT count(*) FROM orders), (SELECT count(*) FROM outbox)")
        self._check("a failure between the two inserts leaves neither", after == [(before[0][0] + 1, before[0][1] + 1)])
        return event

    async def _cycle_2_delivery(self, event: OutboxEvent) -> None:
        heading("CYCLE 2: DELIVERY (PENDING -> PUBLISHED)")
        outcomes = await OutboxDispatcher(self._config, self._store).process_batch()
        self._check(
            "the event is delivered and PUBLISHED", outcomes == [self._status(event)] == [EventStatus.PUBLISHED]
        )
        self._check("the consumer ran its side effect once", self._consumer.side_effects_count == 1)

    async def _cycle_3_dead_letter(self) -> OutboxEvent:
        heading("CYCLE 3: INJECTED 500s, EXPONENTIAL BACKOFF, DEAD-LETTER QUEUE")
        _, event = await self._store.create_order_with_outbox_event(ORDER)
        failing = self._config.model_copy(update={"consumer_endpoint": f"{self._url}?simulate_failure=true"})
        async with OutboxDispatcher(failing, self._store):
            await self._until(event, EventStatus.DEAD_LETTER)
        attempts = self._rows("SELECT retry_count FROM outbox WHERE id = ?", event.id)
        self._check("three 500s quarantine the event", attempts == [(3,)])
        dead = self._rows("SELECT payload_json FROM dead_letter_queue WHERE original_event_id = ?", event.id)
        self._check("the dead-letter queue holds its payload", dead == [(event.payload_json,)])
        return event

    async def _cycle_4_deduplication(self, event: OutboxEvent) -> None:
        heading("CYCLE 4: IDEMPOTENCY (DEDUPLICATION)")
        headers = {"Content-Type": "application/json", "Idempotency-Key": event.idempotency_key}
        async with httpx.AsyncClient() as client:
            answer = await client.post(self._url, content=event.payload_json.encode(), headers=headers)
        self._check("a second delivery is answered 200", answer.status_code == 200)
        self._check("its side effect is not run again", self._consumer.side_effects_count == 1)

    async def _replay(self, event: OutboxEvent) -> None:
        heading("REPLAY: THE DEAD LETTER, ONCE THE CONSUMER IS WELL")
        replayed = await self._store.replay_dead_letter(event.id)
        async with OutboxDispatcher(self._config, self._store):
            await self._until(event, EventStatus.PUBLISHED)
        self._check("the dead letter is replayed and PUBLISHED", replayed)
        key = self._rows("SELECT idempotency_key FROM outbox WHERE id = ?", event.id)
        self._check("under the key that it always had", key == [(event.idempotency_key,)])

    # --- looking ---

    async def _until(self, event: OutboxEvent, status: EventStatus) -> None:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while self._status(event) != status:
                await self._store.wait_for_events(0.05)

    def _status(self, event: OutboxEvent) -> str:
        return str(self._rows("SELECT status FROM outbox WHERE id = ?", event.id)[0][0])

    def _rows(self, sql: str, *values: str) -> list[tuple[Any, ...]]:
        """What another connection sees: only what was committed."""
        connection = sqlite3.connect(self._db_path)
        try:
            return connection.execute(sql, values).fetchall()
        finally:
            connection.close()

    def _check(self, what: str, held: bool) -> None:
        self._checks.append((what, held))

    def _closing_table(self) -> bool:
        heading("WHAT WAS CHECKED")
        for what, held in self._checks:
            print(f"{'ok' if held else 'FAILED':<8}{what}")
        return all(held for _, held in self._checks)


def heading(text: str) -> None:
    print(f"\n=== {text} ===", flush=True)


async def demonstrate(db_path: Path) -> bool:
    consumer = InMemoryIdempotencyStore()
    async with SQLiteStore(db_path) as store, serve(create_app(consumer)) as url:
        counts = (await store.stats()).counts
        if counts[EventStatus.PENDING] or counts[EventStatus.PROCESSING]:
            # Somebody's real events would go to the demonstration's consumer, and be marked as delivered.
            raise ValueError(
                f"{db_path} has events that wait for delivery: the demonstration needs a database of its own"
            )
        return await Demo(db_path, store, consumer, f"{url}/webhooks").run()


def main() -> int:
    parser = argparse.ArgumentParser(description="The four cycles of the transactional outbox, over real HTTP.")
    parser.add_argument("--db", type=Path, metavar="PATH", help="keep the database in this file")
    arguments = parser.parse_args()
    configure_logging(stream=sys.stdout)
    try:
        with tempfile.TemporaryDirectory(prefix="outbox-demo-") as folder:
            held = asyncio.run(demonstrate(arguments.db or Path(folder, "outbox.db")))
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except (OSError, ValueError, sqlite3.Error, TimeoutError) as error:
        print(f"outbox demo: {error or type(error).__name__}", file=sys.stderr)
        return 1
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
