"""Full jitter (article, Section 2)."""

import asyncio
import json
import logging
import math

import pytest

from circuit_breaker import (
    CircuitBreaker,
    CircuitBreakerConfig,
    CircuitBreakerOpenException,
    JsonStructuredFormatter,
)
from circuit_breaker.fastapi_handler import retry_after_header
from circuit_breaker.testing import FakeClock, ScriptedUpstream
from tests.circuit_breaker.support import fail, succeed


async def reject(breaker: CircuitBreaker) -> CircuitBreakerOpenException:
    with pytest.raises(CircuitBreakerOpenException) as rejected:
        await breaker.call(ScriptedUpstream())
    return rejected.value


@pytest.mark.parametrize(("attempt", "cap"), [(0, 0.5), (1, 1.0), (2, 2.0), (3, 4.0), (4, 5.0), (40, 5.0)])
def test_ten_thousand_draws_are_uniform_up_to_the_cap(attempt: int, cap: float, breaker: CircuitBreaker) -> None:
    draws = [breaker.calculate_backoff(attempt) for _ in range(10_000)]

    assert min(draws) >= 0.0
    assert max(draws) <= cap
    # The mean of 10,000 uniform draws is 3 % off the middle in less than one of a million runs.
    assert sum(draws) / len(draws) == pytest.approx(cap / 2, rel=0.03)


@pytest.mark.parametrize("attempt", [63, 1023, 1024, 10**6, 10**100])
def test_no_attempt_is_too_large(attempt: int, breaker: CircuitBreaker) -> None:
    assert 0.0 <= breaker.calculate_backoff(attempt) <= 5.0


@pytest.mark.parametrize(("base", "cap"), [(5e-324, 1.7e308), (1e-300, 1e300), (1.7e308, 1.7e308), (3.0, 3.0)])
@pytest.mark.parametrize("attempt", [0, 1, 1024, 2097, 2098, 10**6])
def test_the_ends_of_the_float_range_do_not_overflow(attempt: int, base: float, cap: float) -> None:
    breaker = CircuitBreaker("range", CircuitBreakerConfig(base_backoff=base, max_backoff=cap))
    assert 0.0 <= breaker.calculate_backoff(attempt) <= cap


def test_a_negative_attempt_is_the_first(breaker: CircuitBreaker) -> None:
    assert 0.4 < max(breaker.calculate_backoff(-5) for _ in range(1000)) <= 0.5


async def test_five_thousand_rejections_do_not_overflow(breaker: CircuitBreaker) -> None:
    await fail(breaker, times=3)
    for _ in range(5000):
        assert 0.0 <= (await reject(breaker)).backoff_seconds <= 5.0
    assert breaker.snapshot().retry_attempt == 5003


async def test_the_attempt_grows_with_failures_and_rejections_and_a_success_clears_it(
    breaker: CircuitBreaker, clock: FakeClock
) -> None:
    await fail(breaker, times=2)
    assert breaker.snapshot().retry_attempt == 2
    await succeed(breaker)
    assert breaker.snapshot().retry_attempt == 0

    await fail(breaker, times=3)
    await reject(breaker)
    assert breaker.snapshot().retry_attempt == 4
    clock.advance(10.0)
    await succeed(breaker, times=2)
    assert breaker.snapshot().retry_attempt == 0


async def test_exception_log_and_retry_after_give_the_same_number(
    breaker: CircuitBreaker, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="circuit_breaker")
    await breaker.trip()
    clock.advance(3.25)

    rejection = await reject(breaker)

    line = json.loads(JsonStructuredFormatter().format(caplog.records[-1]))
    assert line["event"] == "call_rejected_circuit_open"
    assert line["backoff_seconds"] == rejection.backoff_seconds
    assert rejection.remaining_seconds == 6.75
    assert rejection.retry_after_seconds == 6.75 + rejection.backoff_seconds
    assert retry_after_header(rejection) == str(math.ceil(6.75 + rejection.backoff_seconds))


async def test_a_rejection_in_half_open_has_a_backoff_and_nothing_remaining(
    breaker: CircuitBreaker, clock: FakeClock
) -> None:
    await fail(breaker, times=3)
    clock.advance(10.0)
    async with breaker.guard(), breaker.guard():
        rejection = await reject(breaker)

    assert rejection.remaining_seconds == 0.0
    assert 0.0 <= rejection.backoff_seconds <= 5.0
    assert "HALF_OPEN" in rejection.message


async def test_fifty_callers_are_told_fifty_different_times(breaker: CircuitBreaker) -> None:
    await fail(breaker, times=3)
    rejections = await asyncio.gather(*(reject(breaker) for _ in range(50)))
    assert len({rejection.backoff_seconds for rejection in rejections}) == 50
