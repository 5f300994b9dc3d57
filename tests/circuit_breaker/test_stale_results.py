"""A result counts only in the generation that admitted its call."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from circuit_breaker import CircuitBreaker
from circuit_breaker.testing import FakeClock, Hold, ScriptedUpstream
from tests.circuit_breaker.conftest import Log
from tests.circuit_breaker.support import CLOSED, HALF_OPEN, OPEN, UpstreamError, fail, succeed

Move = Callable[[CircuitBreaker, FakeClock], Awaitable[None]]


async def trip_by_failures(breaker: CircuitBreaker, clock: FakeClock) -> None:
    await fail(breaker, times=3)


async def recover(breaker: CircuitBreaker, clock: FakeClock) -> None:
    await fail(breaker, times=3)
    clock.advance(10.0)
    await succeed(breaker, times=2)
    await fail(breaker)  # a streak that a late success must not end


async def half_open(breaker: CircuitBreaker, clock: FakeClock) -> None:
    await fail(breaker, times=3)
    clock.advance(10.0)
    await succeed(breaker)


async def reset(breaker: CircuitBreaker, clock: FakeClock) -> None:
    await breaker.reset()
    await fail(breaker)


async def trip(breaker: CircuitBreaker, clock: FakeClock) -> None:
    await breaker.trip("maintenance")


async def start(breaker: CircuitBreaker, then: object) -> tuple[Hold, "asyncio.Task[object]"]:
    hold = Hold(then=then)
    call: asyncio.Task[object] = asyncio.create_task(breaker.call(ScriptedUpstream(hold)))
    await asyncio.sleep(0)
    return hold, call


async def finish(hold: Hold, call: "asyncio.Task[object]") -> None:
    hold.release()
    await asyncio.gather(call, return_exceptions=True)


@pytest.mark.parametrize("then", ["ok", UpstreamError], ids=["success", "failure"])
@pytest.mark.parametrize("move", [trip_by_failures, recover, half_open, reset, trip])
async def test_a_late_result_from_closed_changes_nothing(
    move: Move, then: object, breaker: CircuitBreaker, clock: FakeClock, events: Log
) -> None:
    hold, call = await start(breaker, then)
    await move(breaker, clock)
    clock.advance(1.0)
    before = breaker.snapshot()

    await finish(hold, call)

    assert breaker.snapshot() == before
    assert events()[-1] == "stale_result_ignored"


@pytest.mark.parametrize("then", ["ok", UpstreamError], ids=["success", "failure"])
async def test_a_late_result_from_an_earlier_half_open_round_changes_nothing(
    then: object, breaker: CircuitBreaker, clock: FakeClock, events: Log
) -> None:
    await fail(breaker, times=3)
    clock.advance(10.0)
    hold, late_probe = await start(breaker, then)
    await fail(breaker)  # the second probe reopens
    assert breaker.state == OPEN
    clock.advance(10.0)
    await succeed(breaker)  # one good probe of the next round; the late one must not be the second
    before = breaker.snapshot()

    await finish(hold, late_probe)

    assert breaker.snapshot() == before
    assert breaker.state == HALF_OPEN
    assert events()[-1] == "stale_result_ignored"
    await succeed(breaker)
    assert breaker.state == CLOSED


async def test_a_probe_of_an_earlier_round_that_is_cancelled_gives_back_no_place_of_this_one(
    breaker: CircuitBreaker, clock: FakeClock
) -> None:
    await fail(breaker, times=3)
    clock.advance(10.0)
    _, late_probe = await start(breaker, "ok")
    await fail(breaker)
    clock.advance(10.0)
    hold, probe = await start(breaker, "ok")

    late_probe.cancel()
    await asyncio.wait([late_probe])

    assert late_probe.cancelled()
    assert breaker.snapshot().probes_in_flight == 1
    await finish(hold, probe)
    assert breaker.snapshot().half_open_successes == 1


async def test_a_late_failure_does_not_prolong_an_open_circuit(breaker: CircuitBreaker, clock: FakeClock) -> None:
    hold, call = await start(breaker, UpstreamError)
    await fail(breaker, times=3)
    clock.advance(9.0)

    await finish(hold, call)

    assert breaker.snapshot().remaining_seconds == pytest.approx(1.0)


async def test_a_cancelled_call_of_an_earlier_generation_leaves_no_line(
    breaker: CircuitBreaker, clock: FakeClock, events: Log
) -> None:
    _, call = await start(breaker, "ok")
    await breaker.trip("maintenance")
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)

    assert events() == ["state_transition_closed_to_open"]
