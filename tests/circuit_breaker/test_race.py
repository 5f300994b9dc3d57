"""Fifty coroutines at once: at the edge of tripping, and in HALF_OPEN."""

import asyncio

import pytest

from circuit_breaker import CircuitBreaker, CircuitBreakerConfig, CircuitBreakerOpenException, Transition
from circuit_breaker.testing import FakeClock, Hold, ScriptedUpstream
from tests.circuit_breaker.conftest import Log
from tests.circuit_breaker.support import CLOSED, HALF_OPEN, OPEN, UpstreamError, fail, succeed


@pytest.mark.parametrize("healthy", [True, False], ids=["healthy", "failing"])
@pytest.mark.parametrize("cap", [1, 2, 5])
async def test_exactly_the_cap_reaches_an_upstream_that_takes_10_ms(cap: int, healthy: bool, clock: FakeClock) -> None:
    breaker = CircuitBreaker("cap", CircuitBreakerConfig(half_open_max_calls=cap), clock=clock)
    await fail(breaker, times=3)
    clock.advance(10.0)
    reached = 0

    async def upstream() -> None:
        nonlocal reached
        reached += 1
        await asyncio.sleep(0.01)
        if not healthy:
            raise UpstreamError

    results = await asyncio.gather(*(breaker.call(upstream) for _ in range(50)), return_exceptions=True)

    assert reached == cap
    assert sum(isinstance(result, CircuitBreakerOpenException) for result in results) == 50 - cap
    assert breaker.state == (CLOSED if healthy else OPEN)


async def test_probes_that_end_one_by_one_let_nobody_else_through(breaker: CircuitBreaker, clock: FakeClock) -> None:
    await fail(breaker, times=3)
    clock.advance(10.0)
    held = Hold(then="ok")
    upstream = ScriptedUpstream("ok", held, UpstreamError)

    await breaker.call(upstream)
    second = asyncio.create_task(breaker.call(upstream))
    await asyncio.sleep(0)
    for _ in range(10):  # One probe is done and one is in flight: counted at once, there would be room for a third.
        with pytest.raises(CircuitBreakerOpenException):
            await breaker.call(upstream)

    assert upstream.calls == 2
    held.release()
    await second
    assert breaker.state == CLOSED


async def test_callers_that_keep_arriving_while_the_first_probe_succeeds_are_rejected_to_the_last(
    breaker: CircuitBreaker, clock: FakeClock
) -> None:
    await fail(breaker, times=3)
    clock.advance(10.0)
    held = [Hold(), Hold()]
    upstream = ScriptedUpstream(*held)
    probes = [asyncio.create_task(breaker.call(upstream)) for _ in held]
    for hold in held:
        await asyncio.sleep(0)
        with pytest.raises(CircuitBreakerOpenException):
            await breaker.call(upstream)
        hold.release()
    await asyncio.gather(*probes)

    assert upstream.calls == 2


async def test_at_the_edge_of_tripping_all_fifty_of_a_call_that_awaits_fail_and_the_circuit_opens_once(
    breaker: CircuitBreaker, clock: FakeClock, events: Log
) -> None:
    await fail(breaker, times=2)
    transitions: list[Transition] = []
    breaker.add_listener(transitions.append)
    held = [Hold(then=UpstreamError) for _ in range(50)]
    upstream = ScriptedUpstream(*held)
    calls = [asyncio.create_task(breaker.call(upstream)) for _ in held]
    await asyncio.sleep(0)
    for hold, call in zip(held, calls, strict=True):  # each failure comes a tenth of a second after the one before
        hold.release()
        await asyncio.wait([call])
        clock.advance(0.1)

    results = await asyncio.gather(*calls, return_exceptions=True)

    assert sum(isinstance(result, UpstreamError) for result in results) == 50
    assert [(t.from_state, t.to_state) for t in transitions] == [(CLOSED, OPEN)]
    assert events().count("state_transition_closed_to_open") == 1
    assert events().count("stale_result_ignored") == 49
    # The recovery timer runs from the first failure: the later ones did not move it.
    assert breaker.snapshot().remaining_seconds == pytest.approx(10.0 - 5.0)


async def test_a_circuit_that_closed_again_admits_everybody(breaker: CircuitBreaker, clock: FakeClock) -> None:
    await fail(breaker, times=3)
    clock.advance(10.0)
    await succeed(breaker, times=2)

    results = await asyncio.gather(*(breaker.call(ScriptedUpstream("ok")) for _ in range(50)))

    assert results == ["ok"] * 50


async def test_the_circuit_stays_open_until_the_last_instant_of_the_recovery_time(
    breaker: CircuitBreaker, clock: FakeClock
) -> None:
    await fail(breaker, times=3)
    clock.advance(9.999)
    with pytest.raises(CircuitBreakerOpenException) as rejected:
        await succeed(breaker)
    assert rejected.value.remaining_seconds == pytest.approx(0.001)

    clock.advance(0.001)
    await succeed(breaker)
    assert breaker.state == HALF_OPEN
