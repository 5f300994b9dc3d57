"""Async generators are guarded from the first item to the last."""

import asyncio
import gc
import inspect
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any

import httpx
import pytest
from fastapi import Depends, FastAPI, HTTPException

from circuit_breaker import CircuitBreaker, CircuitBreakerConfig, CircuitBreakerOpenException, circuit_breaker
from circuit_breaker.testing import FakeClock
from tests.circuit_breaker.support import CLOSED, HALF_OPEN, OPEN, UpstreamError, fail, succeed


async def numbers(fail_after: int | None = None) -> AsyncGenerator[int, None]:
    for number in range(3):
        if number == fail_after:
            raise UpstreamError
        yield number


async def echo() -> AsyncGenerator[str, str]:
    received = yield "ready"
    while True:
        try:
            received = yield f"got {received}"
        except KeyError as error:
            received = f"error {error}"


@pytest.fixture
async def probing(clock: FakeClock) -> CircuitBreaker:
    breaker = CircuitBreaker("stream", CircuitBreakerConfig(half_open_max_calls=1), clock=clock)
    await breaker.trip()
    clock.advance(10.0)
    return breaker


async def test_a_stream_stays_an_async_generator_function(breaker: CircuitBreaker) -> None:
    guarded: Any = breaker(numbers)
    assert inspect.isasyncgenfunction(guarded)
    assert inspect.signature(guarded) == inspect.signature(numbers)
    assert guarded.breaker is breaker
    assert [number async for number in guarded()] == [0, 1, 2]


async def test_a_stream_is_one_call_admitted_with_its_first_item_and_settled_at_its_end(
    probing: CircuitBreaker,
) -> None:
    stream = probing(numbers)()
    assert probing.state == OPEN  # not begun, not admitted

    assert await anext(stream) == 0
    assert probing.snapshot().probes_in_flight == 1
    assert [number async for number in stream] == [1, 2]
    assert probing.state == CLOSED


@pytest.mark.parametrize("fail_after", [0, 1, 2])
async def test_a_failure_counts_whenever_it_comes(fail_after: int, breaker: CircuitBreaker) -> None:
    for _ in range(3):
        with pytest.raises(UpstreamError):
            async for _ in breaker(numbers)(fail_after):
                pass
    assert breaker.state == OPEN
    with pytest.raises(CircuitBreakerOpenException):
        await anext(breaker(numbers)())


async def test_a_stream_closed_early_is_ignored_and_closes_the_inner_one(probing: CircuitBreaker) -> None:
    closed: list[str] = []

    @probing
    async def stream() -> AsyncGenerator[int, None]:
        try:
            yield 1
            yield 2
        finally:
            await asyncio.sleep(0)
            closed.append("inner")

    items = stream()
    await anext(items)
    await items.aclose()

    assert closed == ["inner"]
    assert probing.state == HALF_OPEN
    assert probing.snapshot().probes_in_flight == 0
    await succeed(probing)
    assert probing.state == CLOSED


async def test_a_forgotten_stream_gives_its_place_back(probing: CircuitBreaker) -> None:
    async def look_at_the_first() -> None:
        async for _ in probing(numbers)():
            break

    await look_at_the_first()
    gc.collect()
    for _ in range(5):  # the event loop closes it in a task of its own
        await asyncio.sleep(0)
    assert probing.snapshot().probes_in_flight == 0


async def test_a_failure_while_closing_counts(breaker: CircuitBreaker) -> None:
    @breaker
    async def stream() -> AsyncGenerator[int, None]:
        try:
            yield 1
        finally:
            raise UpstreamError

    items = stream()
    await anext(items)
    with pytest.raises(UpstreamError):
        await items.aclose()
    assert breaker.snapshot().consecutive_failures == 1


async def test_a_cancelled_stream_is_ignored(probing: CircuitBreaker) -> None:
    @probing
    async def stream() -> AsyncGenerator[int, None]:
        await asyncio.Event().wait()
        yield 1

    task = asyncio.create_task(anext(stream()))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert probing.snapshot().probes_in_flight == 0
    assert probing.state == HALF_OPEN


async def test_asend_and_athrow_reach_the_inner_generator(breaker: CircuitBreaker) -> None:
    stream = breaker(echo)()
    assert await anext(stream) == "ready"
    assert await stream.asend("a") == "got a"
    assert await stream.athrow(KeyError("k")) == "got error 'k'"
    assert await stream.asend("b") == "got b"
    await stream.aclose()
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_what_the_consumer_throws_in_is_ignored_when_it_comes_back(breaker: CircuitBreaker) -> None:
    await fail(breaker, times=2)
    for _ in range(5):
        stream = breaker(numbers)()
        await anext(stream)
        with pytest.raises(ValueError, match="mine"):
            await stream.athrow(ValueError("mine"))
    assert breaker.snapshot().consecutive_failures == 2


async def test_what_the_stream_raises_in_answer_to_it_counts(breaker: CircuitBreaker) -> None:
    @breaker
    async def stream() -> AsyncGenerator[int, None]:
        try:
            yield 1
        except ValueError:
            raise UpstreamError from None

    items = stream()
    await anext(items)
    with pytest.raises(UpstreamError):
        await items.athrow(ValueError())
    assert breaker.snapshot().consecutive_failures == 1


async def test_a_failure_after_the_stream_handled_what_was_thrown_in_counts(breaker: CircuitBreaker) -> None:
    @breaker
    async def stream() -> AsyncGenerator[int, None]:
        try:
            yield 1
        except ValueError:
            yield 2
        raise UpstreamError

    items = stream()
    await anext(items)
    assert await items.athrow(ValueError()) == 2
    with pytest.raises(UpstreamError):
        await anext(items)
    assert breaker.snapshot().consecutive_failures == 1


async def test_it_works_under_asynccontextmanager(breaker: CircuitBreaker) -> None:
    @asynccontextmanager
    @breaker
    async def session(fail_in: str = "") -> AsyncIterator[str]:
        if fail_in == "enter":
            raise UpstreamError
        yield "session"
        if fail_in == "exit":
            raise UpstreamError

    async with session() as opened:
        assert opened == "session"
    with pytest.raises(ZeroDivisionError):
        async with session():
            raise ZeroDivisionError
    assert breaker.snapshot().consecutive_failures == 0

    for number, place in enumerate(("enter", "exit", "enter"), start=1):
        with pytest.raises(UpstreamError):
            async with session(place):
                pass
        assert breaker.snapshot().consecutive_failures == number
    assert breaker.state == OPEN


async def test_a_fastapi_dependency_with_yield_is_guarded() -> None:
    app = FastAPI()
    closed: list[str] = []

    @circuit_breaker(name="database")
    async def database() -> AsyncIterator[str]:
        try:
            yield "connection"
        finally:
            closed.append("connection")

    @app.get("/{status}")
    async def read(status: int, connection: Annotated[str, Depends(database)]) -> str:
        if status != 200:
            raise HTTPException(status)
        return connection

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://app") as client:
        assert (await client.get("/200")).json() == "connection"
        for _ in range(5):  # the endpoint's own errors pass through the dependency: not the database's fault
            assert (await client.get("/404")).status_code == 404
        assert (await client.get("/200")).status_code == 200
    assert len(closed) == 7
