"""What each answer of a consumer does to the event, over real sockets (Section 4.2, 4.3).

Every test runs with the dispatcher's own client and with httpx on aiohttp's transport, the `fast` extra.
"""

import asyncio
import gzip
import socket
import tracemalloc
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import httpx
import httpx_aiohttp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outbox.config import AppConfig
from outbox.database import SQLiteStore
from outbox.delivery import Delivery
from outbox.dispatcher import OutboxDispatcher
from outbox.http_client import IDLE_CONNECTION_SECONDS, create_client
from outbox.models import EventStatus, OutboxEvent
from tests.outbox.conftest import FakeClock
from tests.outbox.misbehaving import Exchange, Script, answering, head, header_of, raw_server
from tests.outbox.support import add_event, rows, wait_until

PUBLISHED, PENDING, DEAD_LETTER = EventStatus.PUBLISHED, EventStatus.PENDING, EventStatus.DEAD_LETTER


@pytest.fixture(params=["default", "fast"])
async def client(request: pytest.FixtureRequest) -> AsyncIterator[httpx.AsyncClient]:
    if request.param == "default":
        client = create_client()
    else:
        client = httpx.AsyncClient(transport=httpx_aiohttp.AiohttpTransport())
    async with client:
        yield client


class Outbox:
    """One event after the other, each delivered once to some URL."""

    def __init__(self, store: SQLiteStore, db_path: Path, client: httpx.AsyncClient, clock: FakeClock) -> None:
        self.store, self.db_path, self.client, self.clock = store, db_path, client, clock
        self.added = 0

    def dispatcher(self, url: str, **settings: Any) -> OutboxDispatcher:
        settings = {"request_timeout": 8.0, "base_backoff": 5.0} | settings
        return OutboxDispatcher(AppConfig(consumer_endpoint=url, **settings), self.store, self.client)

    async def add(self) -> None:
        self.added += 1
        await add_event(self.store, f"aggregate-{self.added}", number=self.added)

    async def deliver(self, url: str, **settings: Any) -> EventStatus | None:
        await self.add()
        outcomes = await self.dispatcher(url, **settings).process_batch()
        assert len(outcomes) == 1
        return outcomes[0]

    def last_error(self) -> str:
        [(error,)] = rows(self.db_path, "SELECT last_error FROM outbox ORDER BY sequence DESC LIMIT 1")
        assert isinstance(error, str)
        return error

    def due_in(self) -> float:
        [(due,)] = rows(self.db_path, "SELECT next_attempt_at FROM outbox ORDER BY sequence DESC LIMIT 1")
        return (datetime.fromisoformat(due) - self.clock.now).total_seconds()


@pytest.fixture
def outbox(store: SQLiteStore, db_path: Path, client: httpx.AsyncClient, clock: FakeClock) -> Outbox:
    return Outbox(store, db_path, client, clock)


# --- the status decides ---


@pytest.mark.parametrize("status", ["200 OK", "201 Created", "202 Accepted", "226 IM Used"])
async def test_any_2xx_with_a_body_publishes(outbox: Outbox, status: str) -> None:
    async with raw_server(answering(status, b'{"fine": true}')) as server:
        assert await outbox.deliver(server.url) == PUBLISHED


async def test_204_without_a_body_publishes(outbox: Outbox) -> None:
    async def no_content(exchange: Exchange) -> None:
        await exchange.send(head("204 No Content"))

    async with raw_server(no_content) as server:
        assert await outbox.deliver(server.url) == PUBLISHED


@pytest.mark.parametrize("status", ["301 Moved Permanently", "302 Found", "307 Temporary Redirect", "308 Permanent"])
async def test_a_redirect_is_not_followed_and_the_other_host_sees_nothing(outbox: Outbox, status: str) -> None:
    async with (
        raw_server(answering("200 OK")) as other_host,
        raw_server(answering(status, b"", f"Location: {other_host.url}")) as server,
    ):
        assert await outbox.deliver(server.url) == PENDING
        assert len(server.requests) == 1
        assert other_host.connections == 0
    assert outbox.last_error() == f"HTTP {status[:3]}"


@pytest.mark.parametrize("status", [400, 410, 413, 422])
async def test_a_permanent_failure_is_quarantined_at_the_first_attempt(outbox: Outbox, status: int) -> None:
    async with raw_server(answering(f"{status} Refused", b"amount is missing")) as server:
        assert await outbox.deliver(server.url, max_delivery_attempts=3) == DEAD_LETTER

    assert rows(outbox.db_path, "SELECT status, retry_count, last_error FROM outbox") == [
        ("DEAD_LETTER", 1, f"HTTP {status}: amount is missing")
    ]
    assert rows(outbox.db_path, "SELECT failure_reason FROM dead_letter_queue") == [
        (f"HTTP {status}: amount is missing",)
    ]


@pytest.mark.parametrize("status", [401, 403, 404, 408, 409, 418, 429, 500, 502, 503, 504, 599])
async def test_any_other_failure_is_retried_after_the_backoff(outbox: Outbox, status: int) -> None:
    async with raw_server(answering(f"{status} Failed", b"not now")) as server:
        assert await outbox.deliver(server.url) == PENDING

    assert outbox.last_error() == f"HTTP {status}: not now"
    assert outbox.due_in() == 5.0
    assert rows(outbox.db_path, "SELECT retry_count FROM outbox") == [(1,)]


async def test_which_statuses_are_permanent_is_a_setting(outbox: Outbox) -> None:
    async with raw_server(answering("404 Not Found")) as server:
        assert await outbox.deliver(server.url, permanent_failure_statuses={404}) == DEAD_LETTER
    async with raw_server(answering("400 Bad Request")) as server:
        assert await outbox.deliver(server.url, permanent_failure_statuses=set()) == PENDING


async def test_an_informational_answer_comes_before_the_one_that_counts(outbox: Outbox) -> None:
    async def hints_first(exchange: Exchange) -> None:
        await exchange.send(head("103 Early Hints", "Link: </style.css>") + head("100 Continue"))
        await exchange.send(head("200 OK", "Content-Length: 0"))

    async with raw_server(hints_first) as server:
        assert await outbox.deliver(server.url) == PUBLISHED


async def test_the_request_carries_the_article_s_headers_and_the_stored_bytes_on_every_attempt(
    outbox: Outbox,
) -> None:
    async with raw_server(answering("500 Oops")) as server:
        await outbox.deliver(server.url)
        outbox.clock.advance(5.0)
        assert await outbox.dispatcher(server.url).process_batch() == [PENDING]
        first, second = server.requests

    [(event_id, payload_json, key)] = rows(outbox.db_path, "SELECT id, payload_json, idempotency_key FROM outbox")
    for request in (first, second):
        assert request.startswith(b"POST /webhooks HTTP/1.1\r\n")
        assert request.partition(b"\r\n\r\n")[2] == payload_json.encode()
        assert header_of(request, "Idempotency-Key") == key
        assert header_of(request, "X-Event-Id") == event_id
        assert header_of(request, "X-Event-Type") == "test.happened"
        assert header_of(request, "Content-Type") == "application/json"
        assert header_of(request, "Accept-Encoding") == "identity"
        assert header_of(request, "Cookie") is None


# --- Retry-After ---


@pytest.mark.parametrize(
    ("status", "retry_after", "expected"),
    [
        (429, "120", 120.0),
        (503, "120", 120.0),
        (429, "2", 5.0),  # never below the backoff
        (429, "999999", 3600.0),  # at most an hour
        (429, "9" * 500, 3600.0),
        (500, "120", 5.0),  # only 429 and 503 mean it
        (429, "-5", 5.0),
        (429, "1e3", 5.0),
        (429, "7.5", 5.0),
        (429, "", 5.0),
        (429, "soon", 5.0),
        (429, "\xb2\xb3", 5.0),
        (429, "Sun, 06 Nov 1994 08:49:37 GMT", 5.0),  # the past
        (429, "Fri, 31 Dec 9999 23:59:59 GMT", 3600.0),
        (429, "Fri, 31 Dec 99999999999999999999 23:59:59 GMT", 5.0),
    ],
)
async def test_retry_after_can_only_lengthen_the_wait_and_by_an_hour_at_most(
    outbox: Outbox, status: int, retry_after: str, expected: float
) -> None:
    async with raw_server(answering(f"{status} Busy", b"", f"Retry-After: {retry_after}")) as server:
        assert await outbox.deliver(server.url) == PENDING
    assert outbox.due_in() == expected


async def test_retry_after_may_be_a_date(outbox: Outbox) -> None:
    in_ten_minutes = format_datetime(datetime.now(UTC) + timedelta(minutes=10), usegmt=True)
    async with raw_server(answering("503 Busy", b"", f"Retry-After: {in_ten_minutes}")) as server:
        assert await outbox.deliver(server.url) == PENDING
    assert 540 < outbox.due_in() <= 600


async def test_an_attempt_answered_with_retry_after_counts(outbox: Outbox) -> None:
    async with raw_server(answering("429 Busy", b"", "Retry-After: 60")) as server:
        assert await outbox.deliver(server.url, max_delivery_attempts=1) == DEAD_LETTER


_date_like = st.lists(
    st.one_of(
        st.sampled_from(["Mon", "Nov", ",", "1994", "08:49:37", "08.49", "GMT", "+9999", "-0000", "(", ")", '"', "\\"]),
        st.integers(-(10**30), 10**30).map(str),
        st.text(max_size=3),
    ),
    max_size=8,
).map(" ".join)


@settings(deadline=None)
@given(value=st.one_of(st.text(), _date_like))
def test_no_retry_after_raises_or_leaves_the_bounds(value: str) -> None:
    config = AppConfig(consumer_endpoint="http://consumer/", base_backoff=1.0)
    now = datetime(2026, 1, 1, tzinfo=UTC)
    event = OutboxEvent(
        id="event-1",
        event_type="test.happened",
        aggregate_id="aggregate-1",
        sequence=1,
        payload_json="{}",
        idempotency_key="0" * 64,
        status=EventStatus.PROCESSING,
        retry_count=0,
        last_error=None,
        created_at=now,
        updated_at=now,
    )
    delivery = Delivery(config, httpx.URL("http://consumer/"), event)

    async def answer(_: httpx.Request) -> httpx.Response:
        return httpx.Response(429, headers=[(b"Retry-After", value.encode("utf-8", "surrogatepass"))])

    async def send() -> None:
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
            await delivery.send(client)

    asyncio.run(send())
    retry_in = delivery.retry_in()
    assert delivery.status_code == 429
    assert retry_in is not None
    assert 1.0 <= retry_in <= 3600.0


# --- no usable answer ---


async def test_a_refused_connection_is_retried_and_says_so(outbox: Outbox) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        assert await outbox.deliver(f"http://127.0.0.1:{unused.getsockname()[1]}/") == PENDING
    assert "connect" in outbox.last_error().lower()


async def _reset(exchange: Exchange) -> None:
    exchange.reset()


async def _close(exchange: Exchange) -> None:
    exchange.close()


async def _garbage_status_line(exchange: Exchange) -> None:
    await exchange.send(b"SMTP 220 ready\r\n\r\n")
    exchange.close()


async def _cut_in_the_headers(exchange: Exchange) -> None:
    await exchange.send(b"HTTP/1.1 200 OK\r\nContent-Le")
    exchange.close()


async def _binary_noise(exchange: Exchange) -> None:
    await exchange.send(bytes(range(256)) * 40)
    exchange.close()


async def _endless_headers(exchange: Exchange) -> None:
    await exchange.send(b"HTTP/1.1 200 OK\r\n")
    while True:
        await exchange.send(b"X-More: " + b"x" * 4000 + b"\r\n")


@pytest.mark.parametrize(
    "script", [_reset, _close, _garbage_status_line, _cut_in_the_headers, _binary_noise, _endless_headers]
)
async def test_without_a_status_the_attempt_failed_and_last_error_names_the_exception(
    outbox: Outbox, script: Script
) -> None:
    async with raw_server(script) as server:
        assert await outbox.deliver(server.url) == PENDING
    kind, _, explanation = outbox.last_error().partition(": ")
    assert kind.isidentifier()
    assert explanation
    assert rows(outbox.db_path, "SELECT retry_count FROM outbox") == [(1,)]


async def _say_nothing(exchange: Exchange) -> None:
    await exchange.hang()


async def _drip_headers(exchange: Exchange) -> None:
    await exchange.send(b"HTTP/1.1 200 OK\r\nX-Slow: ")
    while True:
        await asyncio.sleep(0.02)
        await exchange.send(b"x")


async def _informational_for_ever(exchange: Exchange) -> None:
    while True:
        await exchange.send(head("100 Continue"))
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("script", [_say_nothing, _drip_headers, _informational_for_ever])
async def test_no_status_within_request_timeout_fails_however_busy_the_connection_is(
    outbox: Outbox, script: Script
) -> None:
    async with raw_server(script) as server:
        assert await outbox.deliver(server.url, request_timeout=0.3) == PENDING
    assert outbox.last_error() == "no answer within 0.3 s"


async def test_a_host_that_never_accepts_meets_the_same_deadline(outbox: Outbox) -> None:
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(0)
        url = f"http://127.0.0.1:{deaf.getsockname()[1]}/"
        assert await outbox.deliver(url, request_timeout=0.3) == PENDING
    assert outbox.last_error() == "no answer within 0.3 s"


# --- once a status has arrived it decides ---


def _then(status: str, what: Script) -> Script:
    async def script(exchange: Exchange) -> None:
        await exchange.send(head(status, "Content-Length: 1000") + b"the beginning")
        await asyncio.sleep(0.05)  # so that the head is not lost in the reset
        await what(exchange)

    return script


async def _drip_body(exchange: Exchange) -> None:
    while True:
        await exchange.send(b".")
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("trouble", [_reset, _close, _say_nothing, _drip_body])
async def test_trouble_in_the_body_of_a_200_does_not_undo_it(outbox: Outbox, trouble: Script) -> None:
    async with raw_server(_then("200 OK", trouble)) as server:
        assert await outbox.deliver(server.url, request_timeout=0.4) == PUBLISHED


@pytest.mark.parametrize("trouble", [_reset, _close, _say_nothing, _drip_body])
async def test_trouble_in_the_body_of_a_410_does_not_soften_it(outbox: Outbox, trouble: Script) -> None:
    async with raw_server(_then("410 Gone", trouble)) as server:
        assert await outbox.deliver(server.url, request_timeout=0.4) == DEAD_LETTER
    assert outbox.last_error().startswith("HTTP 410: the beginning")


@pytest.mark.parametrize(("status", "settled"), [("200 OK", "PUBLISHED"), ("410 Gone", "DEAD_LETTER")])
async def test_a_cancellation_while_the_body_is_read_settles_by_the_status(
    outbox: Outbox, status: str, settled: str
) -> None:
    status_arrived = asyncio.Event()

    async def note(_: httpx.Response) -> None:
        status_arrived.set()

    outbox.client.event_hooks = {"response": [note]}
    async with raw_server(_then(status, _say_nothing)) as server:
        await outbox.add()
        batch = asyncio.create_task(outbox.dispatcher(server.url).process_batch())
        await status_arrived.wait()
        batch.cancel()
        with pytest.raises(asyncio.CancelledError):
            await batch
    assert rows(outbox.db_path, "SELECT status FROM outbox") == [(settled,)]


# --- the body ---


async def test_invalid_utf8_in_the_body_is_readable_in_last_error(outbox: Outbox) -> None:
    async with raw_server(answering("500 Oops", b"caf\xe9 \xff\xfe\x00 closed")) as server:
        assert await outbox.deliver(server.url) == PENDING
    assert outbox.last_error() == "HTTP 500: caf� ��\x00 closed"


async def test_last_error_holds_no_more_than_a_few_kib_of_the_body(outbox: Outbox) -> None:
    async with raw_server(answering("410 Gone", b"x" * 1_000_000)) as server:
        assert await outbox.deliver(server.url) == DEAD_LETTER
    assert 1000 < len(outbox.last_error()) <= 4096
    [(reason,)] = rows(outbox.db_path, "SELECT failure_reason FROM dead_letter_queue")
    assert reason == outbox.last_error()


def _streaming(status: str, body_length: int | None) -> Script:
    async def script(exchange: Exchange) -> None:
        length = "Connection: close" if body_length is None else f"Content-Length: {body_length}"
        await exchange.send(head(status, length))
        sent = 0
        while body_length is None or sent < body_length:
            await exchange.send(b"x" * 65536)
            sent += 65536

    return script


@pytest.mark.parametrize(("status", "settled"), [("200 OK", PUBLISHED), ("500 Oops", PENDING)])
@pytest.mark.parametrize("body_length", [100 * 2**20, None], ids=["100 MB", "endless"])
async def test_of_a_huge_body_only_the_beginning_is_read(
    outbox: Outbox, status: str, settled: EventStatus, body_length: int | None
) -> None:
    async with raw_server(_streaming(status, body_length)) as server:
        tracemalloc.start()
        try:
            assert await outbox.deliver(server.url) == settled
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        sent = server.bytes_sent
    assert sent < 25 * 2**20  # what the buffers of two sockets take, whoever reads
    assert peak < 8 * 2**20


async def test_a_gzip_bomb_is_neither_unpacked_nor_read_to_its_end(outbox: Outbox) -> None:
    bomb = gzip.compress(bytes(200 * 2**20), compresslevel=1)
    for status, settled in (("200 OK", PUBLISHED), ("500 Oops", PENDING)):
        async with raw_server(answering(status, bomb, "Content-Encoding: gzip")) as server:
            tracemalloc.start()
            try:
                assert await outbox.deliver(server.url) == settled
                _, peak = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
        assert peak < 8 * 2**20


async def test_a_body_that_only_claims_to_be_gzip_is_no_failure(outbox: Outbox) -> None:
    async with raw_server(answering("200 OK", b"not gzip at all", "Content-Encoding: gzip")) as server:
        assert await outbox.deliver(server.url) == PUBLISHED


# --- connections ---


async def test_a_connection_is_used_again_after_a_200(outbox: Outbox) -> None:
    async with raw_server(answering("200 OK", b"{}")) as server:
        for _ in range(5):
            assert await outbox.deliver(server.url) == PUBLISHED
        assert server.connections == 1


async def test_a_connection_that_the_server_closed_while_it_was_idle_costs_no_attempt(outbox: Outbox) -> None:
    close_now = asyncio.Event()
    closed = asyncio.Event()

    async def close_when_idle(exchange: Exchange) -> None:
        await exchange.send(head("200 OK", "Content-Length: 0"))

        async def close() -> None:
            await close_now.wait()
            exchange.close()
            closed.set()

        closers.append(asyncio.create_task(close()))

    closers: list[asyncio.Task[None]] = []
    async with raw_server(close_when_idle) as server:
        assert await outbox.deliver(server.url) == PUBLISHED
        close_now.set()
        await closed.wait()
        await asyncio.sleep(0.05)  # the FIN reaches the other end of the loopback
        assert await outbox.deliver(server.url) == PUBLISHED
        assert server.connections == 2
        await asyncio.gather(*closers)


async def test_idle_connections_are_given_up_before_a_common_server_closes_them() -> None:
    assert IDLE_CONNECTION_SECONDS < 5.0  # uvicorn's keep-alive, for one


async def test_deliveries_after_failed_ones_find_the_client_as_good_as_new(outbox: Outbox) -> None:
    async with raw_server(_say_nothing) as silent:
        for _ in range(3):
            assert await outbox.deliver(silent.url, request_timeout=0.1) == PENDING
    async with raw_server(_reset) as resetting:
        for _ in range(3):
            assert await outbox.deliver(resetting.url) == PENDING
    async with raw_server(answering("200 OK")) as server:
        for _ in range(3):
            assert await outbox.deliver(server.url) == PUBLISHED


async def test_a_cancelled_delivery_closes_its_connection(outbox: Outbox) -> None:
    gone = asyncio.Event()

    async def wait_for_the_end(exchange: Exchange) -> None:
        try:
            while True:
                await exchange.send(head("100 Continue"))
                await asyncio.sleep(0.01)
        except ConnectionError:
            gone.set()

    async with raw_server(wait_for_the_end) as server:
        await outbox.add()
        batch = asyncio.create_task(outbox.dispatcher(server.url).process_batch())
        await wait_until(lambda: len(server.requests) == 1)
        batch.cancel()
        with pytest.raises(asyncio.CancelledError):
            await batch
        await asyncio.wait_for(gone.wait(), 5)


async def test_a_cookie_that_a_consumer_sets_is_not_sent_to_it_again(store: SQLiteStore) -> None:
    async with raw_server(answering("200 OK", b"", "Set-Cookie: session=1; Path=/")) as server:
        await add_event(store, "a")
        await add_event(store, "b")
        dispatcher = OutboxDispatcher(AppConfig(consumer_endpoint=server.url, max_in_flight=1), store)
        async with dispatcher:
            await wait_until(lambda: len(server.requests) == 2)
        assert [header_of(request, "Cookie") for request in server.requests] == [None, None]
