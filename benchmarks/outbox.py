"""What the outbox costs: `python -m benchmarks.outbox [producers dispatch latency memory claims]`.

Every figure is a ratio of two things that are measured in turns in this one run. The baselines are here too: the
article's listing with a connection per call, one shared connection with an await per statement, a bare HTTP client.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import resource
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import uuid4

if not __package__:  # started as a file: this folder comes first on the path, where this file hides the package
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import aiosqlite
import httpx

from outbox.config import AppConfig
from outbox.database import SQLiteStore, configure_connection
from outbox.dispatcher import OutboxDispatcher
from outbox.fast import create_fast_client
from outbox.http_client import create_client
from outbox.models import EventStatus, OrderCreate, compute_idempotency_key, timestamp

ROUNDS = 5
MILLION = 1_000_000
FAST_IN_FLIGHT = 50
ORDER = OrderCreate.model_validate({"customer_email": "ada@example.com", "amount": "149.90"})


# --- Printing ------------------------------------------------------------------------------------------


def say(name: str, ratio: float, comparison: str, target: str) -> None:
    print(f"{name:<66} {ratio:6.2f}x  {comparison}   (target: {target})", flush=True)


def medians(samples: dict[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in samples.items()}


def paired(over: list[float], under: list[float]) -> float:
    """The median of the ratios of the rounds: both sides of a ratio have had the same weather."""
    return statistics.median(a / b for a, b in zip(over, under, strict=True))


# --- Producers -----------------------------------------------------------------------------------------


async def listing_create_order(path: Path) -> None:
    """The article's Section 4.1: a connection per call, an await per statement."""
    order_id, now = str(uuid4()), timestamp(datetime.now(UTC))
    payload = json.dumps({"order_id": order_id, "amount": "149.90"}, sort_keys=True, separators=(",", ":"))
    async with aiosqlite.connect(path, isolation_level=None) as conn:
        await configure_connection(conn)
        await insert_both(conn, order_id, now, payload)


async def insert_both(conn: aiosqlite.Connection, order_id: str, now: str, payload: str) -> None:
    await conn.execute("BEGIN IMMEDIATE;")
    try:
        await conn.execute(
            "INSERT INTO orders (id, customer_email, amount, status, created_at) VALUES (?, ?, ?, ?, ?);",
            (order_id, "ada@example.com", "149.90", "CREATED", now),
        )
        await conn.execute(
            "INSERT INTO outbox (id, event_type, payload_json, idempotency_key, status, retry_count, last_error, "
            "created_at, updated_at) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?);",
            (str(uuid4()), "order.created", payload, compute_idempotency_key(payload), "PENDING", 0, None, now, now),
        )
        await conn.execute("COMMIT;")
    except Exception:
        await conn.execute("ROLLBACK;")
        raise


async def rate(callers: int, calls: int, call: Callable[[], Awaitable[object]]) -> float:
    async def caller() -> None:
        for _ in range(calls):
            await call()

    began = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(callers)))
    return callers * calls / (time.perf_counter() - began)


async def producers() -> None:
    samples: dict[str, list[float]] = {"listing": [], "shared": [], "store": []}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "outbox.db"
        async with SQLiteStore(path) as store, aiosqlite.connect(path, isolation_level=None) as shared:
            await configure_connection(shared)
            turn = asyncio.Lock()

            async def on_the_shared_connection() -> None:
                order_id, now = str(uuid4()), timestamp(datetime.now(UTC))
                payload = json.dumps({"order_id": order_id, "amount": "149.90"}, sort_keys=True, separators=(",", ":"))
                async with turn:
                    await insert_both(shared, order_id, now, payload)

            for _ in range(ROUNDS):
                samples["listing"].append(await rate(50, 4, lambda: listing_create_order(path)))
                samples["shared"].append(await rate(50, 10, on_the_shared_connection))
                samples["store"].append(await rate(50, 60, lambda: store.create_order_with_outbox_event(ORDER)))
    print("orders/s at 50 callers:", {name: round(value) for name, value in medians(samples).items()})
    say("create_order_with_outbox_event, 50 callers", paired(samples["store"], samples["listing"]), "listing", ">= 12")
    say("", paired(samples["store"], samples["shared"]), "shared connection, await per statement", ">= 3")


# --- A consumer that costs next to nothing, in a process of its own ----------------------------------------


class _Answer200(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.buffer = b""

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while True:
            head, separator, rest = self.buffer.partition(b"\r\n\r\n")
            if not separator:
                return
            length = 0
            for line in head.split(b"\r\n"):
                if line.lower().startswith(b"content-length:"):
                    length = int(line.split(b":")[1])
            if len(rest) < length:
                return
            self.buffer = rest[length:]
            assert isinstance(self.transport, asyncio.Transport)
            self.transport.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}")


def _consume(port: "multiprocessing.Queue[int]") -> None:
    async def serve() -> None:
        server = await asyncio.get_running_loop().create_server(_Answer200, "127.0.0.1", 0)
        port.put(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(serve())


@asynccontextmanager
async def consumer() -> AsyncGenerator[str, None]:
    context = multiprocessing.get_context("spawn")
    port: multiprocessing.Queue[int] = context.Queue()
    process = context.Process(target=_consume, args=(port,), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{await asyncio.to_thread(port.get)}/webhooks"
    finally:
        process.kill()
        process.join()


# --- Dispatcher ----------------------------------------------------------------------------------------


async def listing_process_batch(path: Path, url: str, batch_size: int = 10) -> int:
    """The article's Section 4.2: claim a batch, post one after the other, a connection per settlement."""
    async with aiosqlite.connect(path, isolation_level=None) as conn:
        await configure_connection(conn)
        await conn.execute("BEGIN IMMEDIATE;")
        cursor = await conn.execute(
            "SELECT * FROM outbox WHERE status = 'PENDING' ORDER BY created_at LIMIT ?;", (batch_size,)
        )
        events = list(await cursor.fetchall())
        for event in events:
            await conn.execute("UPDATE outbox SET status = 'PROCESSING' WHERE id = ?;", (event["id"],))
        await conn.execute("COMMIT;")
    async with httpx.AsyncClient() as client:
        for event in events:
            headers = {
                "Content-Type": "application/json",
                "Idempotency-Key": event["idempotency_key"],
                "X-Event-Id": event["id"],
                "X-Event-Type": event["event_type"],
            }
            response = await client.post(url, content=event["payload_json"].encode(), headers=headers)
            if response.status_code == 200:
                async with aiosqlite.connect(path, isolation_level=None) as conn:
                    await configure_connection(conn)
                    await conn.execute("BEGIN IMMEDIATE;")
                    await conn.execute("UPDATE outbox SET status = 'PUBLISHED' WHERE id = ?;", (event["id"],))
                    await conn.execute("COMMIT;")
    return len(events)


async def bare_client(client: httpx.AsyncClient, url: str, requests: int, in_flight: int) -> float:
    """The same POST without an outbox, `in_flight` at a time on one client."""
    payload = b'{"aggregate_id":"0","data":{"amount":"149.90"},"type":"order.created"}'

    async def post() -> None:
        headers = {
            "Content-Type": "application/json",
            "Idempotency-Key": uuid4().hex + uuid4().hex,
            "X-Event-Id": str(uuid4()),
            "X-Event-Type": "order.created",
        }
        (await client.post(url, content=payload, headers=headers)).raise_for_status()

    return await rate(in_flight, requests // in_flight, post)


async def dispatch_all(store: SQLiteStore, dispatcher: OutboxDispatcher, events: int) -> float:
    await rate(50, events // 50, lambda: store.create_order_with_outbox_event(ORDER))
    began = time.perf_counter()
    async with dispatcher:
        while (await store.stats()).counts[EventStatus.PUBLISHED] < events:
            await asyncio.sleep(0.02)
        took = time.perf_counter() - began
    await store.purge_published(timedelta(0))
    return events / took


async def dispatch() -> None:
    names = ("listing", "httpx", "dispatcher", "fast client", "fast dispatcher")
    samples: dict[str, list[float]] = {name: [] for name in names}
    events = 1000
    async with consumer() as url:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "outbox.db"
            config = AppConfig(db_path=path, consumer_endpoint=url)
            slots = config.max_in_flight
            many = AppConfig(
                db_path=path, consumer_endpoint=url, max_in_flight=FAST_IN_FLIGHT, batch_size=FAST_IN_FLIGHT
            )
            async with SQLiteStore(path) as store:
                for _ in range(ROUNDS):
                    await rate(50, 4, lambda: store.create_order_with_outbox_event(ORDER))
                    began = time.perf_counter()
                    while await listing_process_batch(path, url):
                        pass
                    samples["listing"].append(200 / (time.perf_counter() - began))
                    await store.purge_published(timedelta(0))
                    async with httpx.AsyncClient() as client:
                        samples["httpx"].append(await bare_client(client, url, events, slots))
                    samples["dispatcher"].append(await dispatch_all(store, OutboxDispatcher(config, store), events))
                    async with create_fast_client(FAST_IN_FLIGHT) as client:
                        samples["fast client"].append(await bare_client(client, url, events, FAST_IN_FLIGHT))
                        fast = OutboxDispatcher(many, store, client)
                        samples["fast dispatcher"].append(await dispatch_all(store, fast, events))
    print("events/s:", {name: round(value) for name, value in medians(samples).items()})
    plain, fast_rate = samples["dispatcher"], samples["fast dispatcher"]
    say(f"dispatcher, {slots} in flight", paired(plain, samples["httpx"]), "httpx alone, as many in flight", ">= 0.85")
    say("", paired(plain, samples["listing"]), "the sequential listing", ">= 3.5")
    say(
        f"fast dispatcher, {FAST_IN_FLIGHT} in flight",
        paired(fast_rate, samples["fast client"]),
        "its client",
        ">= 0.65",
    )
    say("", paired(fast_rate, samples["listing"]), "the sequential listing", ">= 5")


# --- Claims --------------------------------------------------------------------------------------------

FILL = """
    WITH RECURSIVE number (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM number WHERE n < :rows)
    INSERT INTO outbox (id, event_type, aggregate_id, payload_json, idempotency_key, status, next_attempt_at,
                        created_at, updated_at)
    SELECT hex(randomblob(16)), 'order.created', 'aggregate-' || (n % :aggregates),
           '{"aggregate_id":"aggregate-1","data":{"amount":"149.90"},"type":"order.created"}',
           hex(randomblob(32)), :status, :due, :created, :created
    FROM number
"""
LONG_AGO, FAR_AHEAD = "2026-01-01T00:00:00.000000+00:00", "2999-01-01T00:00:00.000000+00:00"
UNDO_CLAIM = (
    "UPDATE outbox SET status = 'PENDING', lease_token = NULL, lease_expires_at = NULL WHERE status = 'PROCESSING'"
)


def fill(path: Path, rows: int, aggregates: int, status: str = "PENDING", due: str = LONG_AGO) -> None:
    connection = sqlite3.connect(path)
    values = {"rows": rows, "aggregates": aggregates, "status": status, "due": due, "created": LONG_AGO}
    connection.execute(FILL, values)
    connection.commit()
    connection.close()


async def claim_seconds(path: Path, store: SQLiteStore) -> float:
    began = time.perf_counter()
    await store.claim_batch(100, 30)
    took = time.perf_counter() - began
    connection = sqlite3.connect(path, isolation_level=None, timeout=30)
    connection.execute(UNDO_CLAIM)
    connection.close()
    return took


async def compare_claims(name: str, target: str, prepare: Callable[[Path, int], None], few: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / "small.db", Path(folder) / "large.db"]
        async with SQLiteStore(paths[0]) as small_store, SQLiteStore(paths[1]) as large_store:
            await asyncio.to_thread(prepare, paths[0], few)
            await asyncio.to_thread(prepare, paths[1], MILLION)
            samples: dict[str, list[float]] = {"small": [], "large": []}
            for _ in range(50):
                samples["small"].append(await claim_seconds(paths[0], small_store))
                samples["large"].append(await claim_seconds(paths[1], large_store))
            middle = medians(samples)
            say(name, middle["large"] / middle["small"], f"{middle['small'] * 1000:.2f} ms, {few:,} of them", target)


async def claims() -> None:
    def with_history(path: Path, published: int) -> None:
        if published:
            fill(path, published, published, status="PUBLISHED")
        fill(path, 1000, 1000)

    def of_as_many_aggregates(path: Path, rows: int) -> None:
        fill(path, rows, rows)

    def of_one_aggregate(path: Path, rows: int) -> None:
        fill(path, rows, 1)

    def all_in_backoff(path: Path, rows: int) -> None:
        fill(path, rows, rows, due=FAR_AHEAD)

    await compare_claims(f"claim of 100 beside {MILLION:,} published", "<= 2", with_history, 0)
    for prepare in (of_as_many_aggregates, of_one_aggregate, all_in_backoff):
        name = f"claim of 100, {MILLION:,} pending {prepare.__name__.replace('_', ' ')}"
        await compare_claims(name, "<= 3", prepare, 1000)


# --- Latency, one event at a time ----------------------------------------------------------------------


async def latency() -> None:
    arrivals: asyncio.Queue[float] = asyncio.Queue()

    class Consumer(_Answer200):
        def data_received(self, data: bytes) -> None:
            arrivals.put_nowait(time.perf_counter())
            super().data_received(data)

    server = await asyncio.get_running_loop().create_server(Consumer, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/webhooks"
    samples: dict[str, list[float]] = {"bare POST": [], "commit to consumer": []}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "outbox.db"
        config = AppConfig(db_path=path, consumer_endpoint=url)
        async with (
            server,
            create_client() as client,
            SQLiteStore(path) as store,
            OutboxDispatcher(config, store, client),
        ):
            for _ in range(200):
                began = time.perf_counter()
                posted = asyncio.create_task(client.post(url, content=b"{}"))
                samples["bare POST"].append(await arrivals.get() - began)
                await posted
                await store.create_order_with_outbox_event(ORDER)
                committed = time.perf_counter()
                samples["commit to consumer"].append(await arrivals.get() - committed)
                while (await store.stats()).counts[EventStatus.PROCESSING]:
                    await asyncio.sleep(0.002)
                while not arrivals.empty():
                    arrivals.get_nowait()
    middle = medians(samples)
    print("ms:", {name: round(value * 1000, 2) for name, value in middle.items()})
    say(
        "commit to consumer, idle",
        middle["commit to consumer"] / middle["bare POST"],
        "a bare POST's way there",
        "<= 3",
    )


# --- Memory --------------------------------------------------------------------------------------------


def resident_kib() -> int:
    if sys.platform == "linux":
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() // 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


async def memory() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "outbox.db"
        async with consumer() as url, SQLiteStore(path) as store:
            config = AppConfig(db_path=path, consumer_endpoint=url)
            await dispatch_all(store, OutboxDispatcher(config, store), 500)  # whatever is allocated once
            before = resident_kib()
            await asyncio.to_thread(fill, path, MILLION, MILLION)
            async with OutboxDispatcher(config, store):
                while (await store.stats()).counts[EventStatus.PUBLISHED] < 3000:
                    await asyncio.sleep(0.1)
            say(f"memory with {MILLION:,} pending events", resident_kib() / before, f"{before // 1024} MiB", "<= 1.2")


# --- The program ---------------------------------------------------------------------------------------

SECTIONS: dict[str, Callable[[], Awaitable[None]]] = {
    "producers": producers,
    "dispatch": dispatch,
    "latency": latency,
    "memory": memory,
    "claims": claims,
}


async def measure(names: list[str]) -> None:
    for name in names:
        print(f"\n{name}", flush=True)
        await SECTIONS[name]()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"of {', '.join(SECTIONS)} (default: all)")
    names = parser.parse_args().sections or list(SECTIONS)
    if unknown := set(names) - SECTIONS.keys():
        parser.error(f"no section {', '.join(sorted(unknown))}")
    print(
        f"{platform.platform()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"SQLite {sqlite3.sqlite_version}, httpx {httpx.__version__}"
    )
    asyncio.run(measure(names))


if __name__ == "__main__":
    main()
