"""The article's six tests, with its names and its numbers (Section 5); everything else has a file of its own."""

import asyncio
import time

import pytest

from circuit_breaker import CircuitBreaker, CircuitBreakerConfig, CircuitBreakerOpenException
from circuit_breaker.testing import FakeClock, ScriptedUpstream
from tests.circuit_breaker.support import CLOSED, HALF_OPEN, OPEN


class MockServiceException(Exception):  # noqa: N818 - the name in the article
    pass


async def fail(breaker: CircuitBreaker, times: int = 1) -> None:
    for _ in range(times):
        with pytest.raises(MockServiceException):
            await breaker.call(ScriptedUpstream(MockServiceException))


async def test_state_closed_to_open_after_threshold(breaker: CircuitBreaker) -> None:
    await fail(breaker, times=2)
    assert breaker.state == CLOSED

    await fail(breaker)
    assert breaker.state == OPEN


async def test_fail_fast_behavior(breaker: CircuitBreaker) -> None:
    upstream = ScriptedUpstream("never seen")
    await fail(breaker, times=3)

    started = time.perf_counter()
    with pytest.raises(CircuitBreakerOpenException) as rejected:
        await breaker.call(upstream)
    elapsed_ms = (time.perf_counter() - started) * 1000

    assert elapsed_ms < 5.0
    assert upstream.calls == 0
    assert rejected.value.circuit_name == "payments"
    assert rejected.value.remaining_seconds == 10.0


async def test_recovery_to_half_open_and_closed(breaker: CircuitBreaker, clock: FakeClock) -> None:
    await fail(breaker, times=3)
    clock.advance(10.0)

    assert await breaker.call(ScriptedUpstream("first probe")) == "first probe"
    assert breaker.state == HALF_OPEN
    assert await breaker.call(ScriptedUpstream("second probe")) == "second probe"
    assert breaker.state == CLOSED


async def test_half_open_reopens_on_single_failure(breaker: CircuitBreaker, clock: FakeClock) -> None:
    await fail(breaker, times=3)
    clock.advance(10.0)
    await breaker.call(ScriptedUpstream("first probe"))

    await fail(breaker)

    assert breaker.state == OPEN
    with pytest.raises(CircuitBreakerOpenException) as rejected:
        await breaker.call(ScriptedUpstream())
    assert rejected.value.remaining_seconds == 10.0


async def test_concurrent_calls_race_condition(breaker: CircuitBreaker, clock: FakeClock) -> None:
    await fail(breaker, times=2)
    failing = ScriptedUpstream(MockServiceException)

    results = await asyncio.gather(*(breaker.call(failing) for _ in range(50)), return_exceptions=True)

    # The failing call does not suspend, so it trips the circuit before the second of the fifty starts.
    assert breaker.state == OPEN
    assert sum(isinstance(result, MockServiceException) for result in results) == 1
    assert sum(isinstance(result, CircuitBreakerOpenException) for result in results) == 49

    clock.advance(10.0)

    async def healthy() -> str:
        await asyncio.sleep(0)  # all fifty arrive while the probes are in flight
        return "ok"

    results = await asyncio.gather(*(breaker.call(healthy) for _ in range(50)), return_exceptions=True)

    assert results.count("ok") == 2
    assert sum(isinstance(result, CircuitBreakerOpenException) for result in results) == 48
    assert breaker.state == CLOSED


def test_jittered_backoff_bounds() -> None:
    breaker = CircuitBreaker("jitter", CircuitBreakerConfig(base_backoff=0.5, max_backoff=5.0))

    for attempt, cap in ((0, 0.5), (1, 1.0), (2, 2.0), (3, 4.0), (4, 5.0), (10, 5.0)):
        draws = [breaker.calculate_backoff(attempt) for _ in range(1000)]
        assert 0.0 <= min(draws) < 0.2 * cap
        assert 0.8 * cap < max(draws) <= cap
