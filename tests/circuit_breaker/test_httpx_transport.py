"""The guarded transport, against a real server on the loopback interface."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from circuit_breaker import CircuitBreakerConfig, CircuitBreakerOpenException
from circuit_breaker.httpx_transport import CircuitBreakerTransport
from circuit_breaker.mock_service import MockService, Mode, create_app, serve
from circuit_breaker.testing import FakeClock
from tests.circuit_breaker.support import CLOSED, HALF_OPEN, OPEN


@pytest.fixture
async def service() -> MockService:
    return MockService()


@pytest.fixture
async def url(service: MockService) -> AsyncIterator[str]:
    async with serve(create_app(service)) as url:
        yield url


@pytest.fixture
def transport(clock: FakeClock) -> CircuitBreakerTransport:
    return CircuitBreakerTransport(clock=clock)


@pytest.fixture
async def client(url: str, transport: CircuitBreakerTransport) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(transport=transport, base_url=url) as client:
        yield client


async def test_an_outage_opens_the_circuit_of_the_host_and_recovery_closes_it(
    service: MockService, client: httpx.AsyncClient, transport: CircuitBreakerTransport, clock: FakeClock
) -> None:
    breaker = transport.breaker_for(client.base_url)
    assert breaker.name == f"127.0.0.1:{client.base_url.port}"
    assert (await client.get("/charge")).json() == {"status": "charged"}

    service.behaviour.mode = Mode.FAIL
    for _ in range(3):
        assert (await client.get("/charge")).status_code == 503
    assert breaker.state == OPEN

    requests = service.requests
    with pytest.raises(CircuitBreakerOpenException):
        await client.get("/charge")
    assert service.requests == requests

    service.behaviour.mode = Mode.OK
    clock.advance(10.0)
    assert [(await client.get("/charge")).status_code for _ in range(2)] == [200, 200]
    assert breaker.state == CLOSED


async def test_a_failure_while_the_body_streams_counts(
    service: MockService, client: httpx.AsyncClient, transport: CircuitBreakerTransport
) -> None:
    service.behaviour.mode = Mode.RESET
    for _ in range(3):
        with pytest.raises(httpx.RemoteProtocolError):
            await client.get("/charge")
    assert transport.breaker_for(client.base_url).state == OPEN


async def test_a_response_is_settled_when_its_body_ends_and_not_when_its_status_arrives(
    client: httpx.AsyncClient, transport: CircuitBreakerTransport, clock: FakeClock
) -> None:
    breaker = transport.breaker_for(client.base_url)
    await breaker.trip()
    clock.advance(10.0)
    async with client.stream("GET", "/charge") as response:
        assert breaker.snapshot().probes_in_flight == 1
        await response.aread()
        assert breaker.snapshot().half_open_successes == 1


@pytest.mark.parametrize(("mode", "state"), [(Mode.OK, HALF_OPEN), (Mode.FAIL, OPEN)])
async def test_a_response_closed_unread_counts_as_its_status_says(
    mode: Mode,
    state: object,
    service: MockService,
    client: httpx.AsyncClient,
    transport: CircuitBreakerTransport,
    clock: FakeClock,
) -> None:
    service.behaviour.mode = mode
    breaker = transport.breaker_for(client.base_url)
    await breaker.trip()
    clock.advance(10.0)
    async with client.stream("GET", "/charge"):
        pass
    assert breaker.state == state
    assert breaker.snapshot().probes_in_flight == 0
    assert breaker.snapshot().half_open_successes == (1 if mode is Mode.OK else 0)


async def test_a_reader_who_stops_half_way_leaves_a_settled_call(
    client: httpx.AsyncClient, transport: CircuitBreakerTransport, clock: FakeClock
) -> None:
    breaker = transport.breaker_for(client.base_url)
    await breaker.trip()
    clock.advance(10.0)
    async with client.stream("GET", "/charge") as response:
        async for _ in response.aiter_raw(chunk_size=1):
            break
    assert breaker.snapshot().half_open_successes == 1


async def test_a_cancelled_request_gives_its_place_back(
    service: MockService, client: httpx.AsyncClient, transport: CircuitBreakerTransport, clock: FakeClock
) -> None:
    service.behaviour.mode = Mode.HANG
    breaker = transport.breaker_for(client.base_url)
    await breaker.trip()
    clock.advance(10.0)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await client.get("/charge")
    assert breaker.state == HALF_OPEN
    assert breaker.snapshot().probes_in_flight == 0


@pytest.mark.parametrize("status", [200, 503])
async def test_a_request_cancelled_in_the_middle_of_its_body_never_counts(status: int, clock: FakeClock) -> None:
    half_way = asyncio.Event()

    class Endless(httpx.AsyncByteStream):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            yield b"more "
            half_way.set()
            await asyncio.Event().wait()

    transport = CircuitBreakerTransport(
        httpx.MockTransport(lambda request: httpx.Response(status, stream=Endless())), clock=clock
    )
    breaker = transport.breaker_for("http://a/")
    await breaker.trip()
    clock.advance(10.0)
    async with httpx.AsyncClient(transport=transport) as client:
        task = asyncio.create_task(client.get("http://a/"))
        await half_way.wait()
        assert breaker.snapshot().probes_in_flight == 1
        task.cancel()
        await asyncio.wait([task])

    assert breaker.state == HALF_OPEN
    assert (breaker.snapshot().probes_in_flight, breaker.snapshot().half_open_successes) == (0, 0)


async def test_a_read_timeout_counts(
    service: MockService, client: httpx.AsyncClient, transport: CircuitBreakerTransport
) -> None:
    service.behaviour.mode = Mode.HANG
    with pytest.raises(httpx.ReadTimeout):
        await client.get("/charge", timeout=httpx.Timeout(30.0, read=0.05))
    assert transport.breaker_for(client.base_url).snapshot().consecutive_failures == 1


async def test_a_404_is_no_failure(client: httpx.AsyncClient, transport: CircuitBreakerTransport) -> None:
    for _ in range(10):
        assert (await client.get("/nowhere")).status_code == 404
    assert transport.breaker_for(client.base_url).state == CLOSED


async def test_fifty_requests_race_for_two_probes(
    service: MockService, client: httpx.AsyncClient, transport: CircuitBreakerTransport, clock: FakeClock
) -> None:
    service.behaviour.latency_seconds = 0.01
    await transport.breaker_for(client.base_url).trip()
    clock.advance(10.0)

    results = await asyncio.gather(*(client.get("/charge") for _ in range(50)), return_exceptions=True)

    assert service.requests == 2
    assert sum(isinstance(result, CircuitBreakerOpenException) for result in results) == 48


async def test_each_host_and_port_has_a_circuit_of_its_own(clock: FakeClock) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(503 if request.url.host == "down.test" else 200, json={"host": request.url.host})

    transport = CircuitBreakerTransport(httpx.MockTransport(answer), clock=clock)
    async with httpx.AsyncClient(transport=transport) as client:
        for _ in range(3):
            await client.get("http://down.test/a")
        with pytest.raises(CircuitBreakerOpenException, match=r"down\.test:80"):
            await client.get("http://DOWN.test:80/b")
        assert (await client.get("https://down.test/")).status_code == 503  # port 443: another server
        assert (await client.get("http://down.test:8080/")).status_code == 503
        assert (await client.get("http://up.test/")).json() == {"host": "up.test"}


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("http://API.test/a", "api.test:80"),
        ("https://api.test/a?b", "api.test:443"),
        ("http://api.test:8080", "api.test:8080"),
        ("http://[::1]:8000/", "[::1]:8000"),
    ],
)
def test_a_circuit_is_named_after_host_and_port(url: str, name: str) -> None:
    assert CircuitBreakerTransport().breaker_for(url).name == name


class TestRegistry:
    """At most `max_breakers`, and none is dropped that knows something."""

    @staticmethod
    def of(size: int, clock: FakeClock) -> CircuitBreakerTransport:
        def answer(request: httpx.Request) -> httpx.Response:
            return httpx.Response(503 if request.url.path == "/down" else 200)

        return CircuitBreakerTransport(httpx.MockTransport(answer), clock=clock, max_breakers=size)

    async def test_the_least_recently_used_goes_first(self, clock: FakeClock) -> None:
        transport = self.of(2, clock)
        first, second = transport.breaker_for("http://a"), transport.breaker_for("http://b")
        assert transport.breaker_for("http://a") is first
        transport.breaker_for("http://c")

        assert transport.breaker_for("http://a") is first
        assert transport.breaker_for("http://b") is not second

    @pytest.mark.parametrize("failures", [1, 3], ids=["running streak", "open"])
    async def test_one_with_failures_on_record_stays(self, failures: int, clock: FakeClock) -> None:
        transport = self.of(2, clock)
        async with httpx.AsyncClient(transport=transport) as client:
            for _ in range(failures):
                await client.get("http://sick/down")
            sick = transport.breaker_for("http://sick")
            for number in range(100):
                await client.get(f"http://host-{number}/")
            assert transport.breaker_for("http://sick") is sick

    async def test_one_that_is_half_open_stays(self, clock: FakeClock) -> None:
        transport = self.of(1, clock)
        breaker = transport.breaker_for("http://a")
        await breaker.trip()
        clock.advance(10.0)
        async with httpx.AsyncClient(transport=transport) as client:
            await client.get("http://a/")
            await client.get("http://b/")
        assert transport.breaker_for("http://a") is breaker
        assert breaker.state == HALF_OPEN

    async def test_when_all_must_stay_a_further_host_is_served_unguarded(self, clock: FakeClock) -> None:
        transport = self.of(1, clock)
        await transport.breaker_for("http://a").trip()
        async with httpx.AsyncClient(transport=transport) as client:
            for _ in range(5):
                assert (await client.get("http://b/down")).status_code == 503
            with pytest.raises(CircuitBreakerOpenException):
                await client.get("http://a/")

    def test_a_bound_below_one_is_refused(self, clock: FakeClock) -> None:
        with pytest.raises(ValueError, match="max_breakers"):
            self.of(0, clock)


async def test_config_and_classify_reach_every_breaker(clock: FakeClock) -> None:
    config = CircuitBreakerConfig(failure_threshold=1)
    seen: list[Any] = []

    def classify(result: Any, error: Exception | None) -> Any:
        seen.append((result, error))
        raise NotImplementedError

    transport = CircuitBreakerTransport(
        httpx.MockTransport(lambda request: httpx.Response(200)), config=config, classify=classify, clock=clock
    )
    async with httpx.AsyncClient(transport=transport) as client:
        await client.get("http://a/")
    assert transport.breaker_for("http://a").config is config
    assert transport.breaker_for("http://a").state == OPEN
    assert seen[0][0].status_code == 200


async def test_closing_the_client_closes_the_wrapped_transport() -> None:
    closed: list[bool] = []

    class Inner(httpx.AsyncBaseTransport):
        async def aclose(self) -> None:
            closed.append(True)

    async with httpx.AsyncClient(transport=CircuitBreakerTransport(Inner())):
        pass
    assert closed == [True]
