"""The idempotent consumer on a real server: one side effect per key, however often it is delivered (Section 4.4)."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import httpx
import pytest

from outbox.http_client import create_client
from outbox.mock_consumer import MAX_BODY_BYTES, InMemoryIdempotencyStore, create_app, serve
from tests.outbox.support import wait_until

PAYLOAD = b'{"order_id":"1"}'


class SideEffect:
    """Counts what it ran for; fails as often as it is told, and waits while its gate is closed."""

    def __init__(self) -> None:
        self.runs: Counter[bytes] = Counter()
        self.completed: Counter[bytes] = Counter()
        self.failures_to_come = 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def __call__(self, payload: bytes) -> None:
        self.runs[payload] += 1
        await self.gate.wait()
        if self.failures_to_come:
            self.failures_to_come -= 1
            raise RuntimeError("the mail server is down")
        self.completed[payload] += 1


class Consumer:
    """The consumer on its server, and a client of it."""

    def __init__(self, url: str, client: httpx.AsyncClient, store: InMemoryIdempotencyStore) -> None:
        self.url, self.client, self.store = url, client, store

    async def post(
        self, key: str | bytes | None = "key-1", payload: bytes = PAYLOAD, query: str = ""
    ) -> httpx.Response:
        key = key.encode() if isinstance(key, str) else key
        headers = {} if key is None else {b"Idempotency-Key": key}
        return await self.client.post(
            f"{self.url}/webhooks{query}", content=payload, headers=httpx.Headers(headers), timeout=10
        )

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        url = httpx.URL(self.url)
        return await asyncio.open_connection(url.host, url.port)


@asynccontextmanager
async def consumer_with(store: InMemoryIdempotencyStore) -> AsyncIterator[Consumer]:
    async with serve(create_app(store)) as url, create_client() as client:
        yield Consumer(url, client, store)


@pytest.fixture
def side_effect() -> SideEffect:
    return SideEffect()


@pytest.fixture
async def consumer(side_effect: SideEffect) -> AsyncIterator[Consumer]:
    async with consumer_with(InMemoryIdempotencyStore(side_effect=side_effect)) as consumer:
        yield consumer


@pytest.fixture
def server_log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Nothing that a client does is an error of the server."""
    with caplog.at_level(logging.WARNING):
        yield caplog
    assert not [record for record in caplog.records if record.name.startswith("uvicorn")]


# --- one side effect ---


async def test_50_concurrent_duplicates_run_one_side_effect(consumer: Consumer, side_effect: SideEffect) -> None:
    side_effect.gate.clear()
    deliveries = [asyncio.create_task(consumer.post()) for _ in range(50)]
    await wait_until(lambda: bool(side_effect.runs))
    side_effect.gate.set()
    answers = await asyncio.gather(*deliveries)

    assert Counter(answer.status_code for answer in answers) == {200: 50}
    assert Counter(answer.json()["status"] for answer in answers) == {"processed": 1, "duplicate": 49}
    assert side_effect.runs[PAYLOAD] == 1
    assert consumer.store.side_effects_count == 1
    assert consumer.store.delivery_hits == 50


async def test_a_duplicate_is_not_answered_before_the_side_effect_has_succeeded(
    consumer: Consumer, side_effect: SideEffect
) -> None:
    side_effect.gate.clear()
    first = asyncio.create_task(consumer.post())
    await wait_until(lambda: bool(side_effect.runs))
    duplicate = asyncio.create_task(consumer.post())
    assert (await consumer.post("another key")).status_code == 400  # the server answers others meanwhile
    assert not duplicate.done()
    side_effect.gate.set()
    assert [(await delivery).status_code for delivery in (first, duplicate)] == [200, 200]


async def test_different_keys_do_not_wait_for_each_other(consumer: Consumer, side_effect: SideEffect) -> None:
    side_effect.gate.clear()
    deliveries = [asyncio.create_task(consumer.post(f"key-{n}", b"%d" % n)) for n in range(10)]
    await wait_until(lambda: len(side_effect.runs) == 10)
    side_effect.gate.set()
    assert {(await delivery).json()["status"] for delivery in deliveries} == {"processed"}


# --- a side effect that fails ---


async def test_a_failed_side_effect_is_not_recorded_and_the_redelivery_runs_it(
    consumer: Consumer, side_effect: SideEffect
) -> None:
    side_effect.failures_to_come = 2
    answers = [await consumer.post() for _ in range(4)]

    assert [answer.status_code for answer in answers] == [500, 500, 200, 200]
    assert [answer.json().get("status") for answer in answers[2:]] == ["processed", "duplicate"]
    assert side_effect.runs[PAYLOAD] == 3
    assert side_effect.completed[PAYLOAD] == 1
    assert consumer.store.side_effects_count == 1
    assert consumer.store.delivery_hits == 2


async def test_the_answer_to_a_failed_side_effect_keeps_its_message_to_the_log(
    consumer: Consumer, side_effect: SideEffect, caplog: pytest.LogCaptureFixture
) -> None:
    side_effect.failures_to_come = 1
    answer = await consumer.post()

    assert "mail server" not in answer.text
    [record] = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert vars(record)["error"] == "RuntimeError: the mail server is down"
    assert vars(record)["idempotency_key"] == "key-1"


async def test_one_of_49_duplicates_that_waited_for_a_failing_first_runs_the_side_effect(
    consumer: Consumer, side_effect: SideEffect
) -> None:
    side_effect.failures_to_come = 1
    side_effect.gate.clear()
    deliveries = [asyncio.create_task(consumer.post()) for _ in range(50)]
    await wait_until(lambda: bool(side_effect.runs))
    side_effect.gate.set()
    answers = await asyncio.gather(*deliveries)

    assert Counter(answer.status_code for answer in answers) == {500: 1, 200: 49}
    assert side_effect.runs[PAYLOAD] == 2
    assert side_effect.completed[PAYLOAD] == 1


async def test_simulate_failure_answers_500_without_a_side_effect(consumer: Consumer, side_effect: SideEffect) -> None:
    assert (await consumer.post(query="?simulate_failure=true")).status_code == 500
    assert not side_effect.runs
    assert consumer.store.delivery_hits == 0
    assert (await consumer.post()).json() == {"status": "processed"}


# --- the key ---


async def test_the_same_key_with_another_payload_is_422_and_changes_nothing(
    consumer: Consumer, side_effect: SideEffect
) -> None:
    await consumer.post()
    assert (await consumer.post(payload=b'{"order_id":"2"}')).status_code == 422
    assert (await consumer.post()).json() == {"status": "duplicate"}
    assert side_effect.runs == {PAYLOAD: 1}


async def test_another_payload_that_waited_for_the_first_is_422_too(
    consumer: Consumer, side_effect: SideEffect
) -> None:
    side_effect.gate.clear()
    first = asyncio.create_task(consumer.post())
    await wait_until(lambda: bool(side_effect.runs))
    other = asyncio.create_task(consumer.post(payload=b"other"))
    side_effect.gate.set()
    assert [(await first).status_code, (await other).status_code] == [200, 422]


@pytest.mark.parametrize(
    "key",
    [None, "", '""', '"', "x" * 256, "two words", "tab\tbed", b"caf\xe9", b"\x7f", '"open', 'closed"', 'a"b'],
)
async def test_without_a_usable_key_it_is_400_and_no_side_effect(
    consumer: Consumer, side_effect: SideEffect, key: str | bytes | None
) -> None:
    answer = await consumer.post(key)
    assert answer.status_code == 400
    assert "Idempotency-Key" in answer.json()["detail"]
    assert not side_effect.runs


async def test_two_keys_on_one_request_are_400(consumer: Consumer, side_effect: SideEffect) -> None:
    headers = [("Idempotency-Key", "key-1"), ("Idempotency-Key", "key-2")]
    answer = await consumer.client.post(f"{consumer.url}/webhooks", content=PAYLOAD, headers=headers)
    assert answer.status_code == 400
    assert not side_effect.runs


async def test_a_key_may_have_255_characters(consumer: Consumer) -> None:
    assert (await consumer.post("x" * 255)).status_code == 200


async def test_a_quoted_key_is_the_bare_key(consumer: Consumer, side_effect: SideEffect) -> None:
    assert (await consumer.post('"key-1"')).json() == {"status": "processed"}
    assert (await consumer.post("key-1")).json() == {"status": "duplicate"}
    assert side_effect.runs[PAYLOAD] == 1


# --- bounds ---


async def test_a_body_of_exactly_the_limit_is_taken(consumer: Consumer) -> None:
    assert (await consumer.post(payload=b"x" * MAX_BODY_BYTES)).status_code == 200


@pytest.mark.parametrize("size", [MAX_BODY_BYTES + 1, 20 * MAX_BODY_BYTES])
@pytest.mark.parametrize("framing", ["Content-Length", "chunked"])
async def test_a_body_over_the_limit_is_413_and_no_side_effect(
    consumer: Consumer, side_effect: SideEffect, size: int, framing: str
) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(size // 65536):
            yield b"x" * 65536
        yield b"x" * (size % 65536)

    content = b"x" * size if framing == "Content-Length" else chunks()
    answer = await consumer.client.post(
        f"{consumer.url}/webhooks", content=content, headers={"Idempotency-Key": "key-1"}, timeout=10
    )
    assert answer.status_code == 413
    assert not side_effect.runs
    assert (await consumer.post()).json() == {"status": "processed"}


async def test_a_content_length_over_the_limit_is_413_before_the_body_has_come(consumer: Consumer) -> None:
    reader, writer = await consumer.connect()
    writer.write(b"POST /webhooks HTTP/1.1\r\nHost: x\r\nIdempotency-Key: k\r\nContent-Length: 99999999999\r\n\r\n")
    async with asyncio.timeout(5):
        assert (await reader.readline()).startswith(b"HTTP/1.1 413 ")
    writer.close()
    await writer.wait_closed()


async def test_only_the_last_max_keys_are_remembered(side_effect: SideEffect) -> None:
    async with consumer_with(InMemoryIdempotencyStore(side_effect=side_effect, max_keys=3)) as consumer:
        for number in range(5):
            await consumer.post(f"key-{number}", b"%d" % number)
        answers = [(await consumer.post(f"key-{number}", b"%d" % number)).json()["status"] for number in (4, 3, 2, 0)]

    assert answers == ["duplicate", "duplicate", "duplicate", "processed"]


async def test_failed_side_effects_leave_nothing_in_memory(consumer: Consumer, side_effect: SideEffect) -> None:
    side_effect.failures_to_come = 20
    for number in range(20):
        await consumer.post(f"key-{number}", b"%d" % number)
    assert not consumer.store._fingerprints
    assert not consumer.store._under_way


@pytest.mark.parametrize("max_keys", [0, -1])
def test_a_store_that_could_remember_nothing_is_refused(max_keys: int) -> None:
    with pytest.raises(ValueError, match=f"max_keys must be at least 1, it is {max_keys}"):
        InMemoryIdempotencyStore(max_keys=max_keys)


# --- clients that leave ---


async def test_a_client_that_disconnects_in_its_body_runs_no_side_effect_and_is_no_error(
    consumer: Consumer, side_effect: SideEffect, server_log: pytest.LogCaptureFixture
) -> None:
    _, writer = await consumer.connect()
    writer.write(b"POST /webhooks HTTP/1.1\r\nHost: x\r\nIdempotency-Key: key-1\r\nContent-Length: 100\r\n\r\nhalf")
    await writer.drain()
    await asyncio.sleep(0.05)  # the request reaches its handler
    writer.close()
    await writer.wait_closed()

    assert (await consumer.post()).json() == {"status": "processed"}
    assert side_effect.runs == {PAYLOAD: 1}


async def test_a_client_that_leaves_while_the_side_effect_runs_finds_it_done_when_it_returns(
    consumer: Consumer, side_effect: SideEffect, server_log: pytest.LogCaptureFixture
) -> None:
    side_effect.gate.clear()
    impatient = asyncio.create_task(consumer.post())
    await wait_until(lambda: bool(side_effect.runs))
    impatient.cancel()
    with pytest.raises(asyncio.CancelledError):
        await impatient
    await asyncio.sleep(0.05)  # the server sees it go
    side_effect.gate.set()

    assert (await consumer.post()).json() == {"status": "duplicate"}
    assert side_effect.completed[PAYLOAD] == 1


async def test_a_client_that_never_ends_its_body_does_not_keep_the_server_from_stopping(
    side_effect: SideEffect,
) -> None:
    async with asyncio.timeout(10):
        async with consumer_with(InMemoryIdempotencyStore(side_effect=side_effect)) as consumer:
            _, writer = await consumer.connect()
            writer.write(b"POST /webhooks HTTP/1.1\r\nHost: x\r\nIdempotency-Key: k\r\nContent-Length: 9\r\n\r\nhalf")
            await writer.drain()
            assert (await consumer.post()).status_code == 200
    writer.close()
    assert side_effect.runs == {PAYLOAD: 1}


# --- the server ---


async def test_a_port_that_is_taken_is_refused_at_once(consumer: Consumer) -> None:
    port = httpx.URL(consumer.url).port
    assert port is not None
    with pytest.raises(OSError, match=r"[Aa]ddress already in use"):
        await serve(create_app(), port).__aenter__()
