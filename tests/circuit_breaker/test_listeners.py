"""Listeners hear of every transition, in order, and can spoil nothing."""

import asyncio
import sys

import pytest

from circuit_breaker import CircuitBreaker, Transition
from circuit_breaker.testing import FakeClock, ScriptedUpstream
from tests.circuit_breaker.conftest import Log
from tests.circuit_breaker.support import CLOSED, HALF_OPEN, OPEN, UpstreamError, fail, succeed

FULL_CYCLE = [
    Transition(CLOSED, OPEN, 1, "failure_threshold"),
    Transition(OPEN, HALF_OPEN, 2, "recovery_time_elapsed"),
    Transition(HALF_OPEN, OPEN, 3, "probe_failed"),
    Transition(OPEN, HALF_OPEN, 4, "recovery_time_elapsed"),
    Transition(HALF_OPEN, CLOSED, 5, "probes_succeeded"),
    Transition(CLOSED, OPEN, 6, "maintenance"),
    Transition(OPEN, CLOSED, 7, "reset_by_hand"),
]


async def full_cycle(breaker: CircuitBreaker, clock: FakeClock) -> None:
    await fail(breaker, times=3)
    clock.advance(10.0)
    await fail(breaker)
    clock.advance(10.0)
    await succeed(breaker, times=2)
    await breaker.trip("maintenance")
    await breaker.reset()


async def test_every_transition_is_told_once_in_order_with_its_generation_and_cause(
    breaker: CircuitBreaker, clock: FakeClock
) -> None:
    heard: list[Transition] = []
    breaker.add_listener(heard.append)
    await full_cycle(breaker, clock)
    assert heard == FULL_CYCLE


async def test_in_the_callback_the_breaker_is_in_the_state_it_tells_of(
    breaker: CircuitBreaker, clock: FakeClock
) -> None:
    agreed: list[bool] = []
    breaker.add_listener(
        lambda event: agreed.append(breaker.state == event.to_state and breaker.generation == event.generation)
    )
    await full_cycle(breaker, clock)
    assert agreed == [True] * len(FULL_CYCLE)


@pytest.mark.parametrize("error", [RuntimeError, asyncio.CancelledError])
async def test_a_listener_that_raises_is_logged_and_changes_nothing(
    error: type[BaseException], breaker: CircuitBreaker, clock: FakeClock, events: Log
) -> None:
    heard: list[Transition] = []

    def broken(event: Transition) -> None:
        raise error

    breaker.add_listener(broken)
    breaker.add_listener(heard.append)

    await full_cycle(breaker, clock)  # asserts the results of all its calls

    assert heard == FULL_CYCLE
    assert events().count("listener_failed") == len(FULL_CYCLE)


async def test_a_listener_may_schedule_further_calls(breaker: CircuitBreaker, clock: FakeClock) -> None:
    heard: list[Transition] = []
    scheduled: list[asyncio.Task[object]] = []

    def reprobe(event: Transition) -> None:
        if event.to_state == HALF_OPEN:
            scheduled.append(asyncio.create_task(breaker.call(ScriptedUpstream("second probe"))))

    breaker.add_listener(reprobe)
    breaker.add_listener(heard.append)
    await fail(breaker, times=3)
    clock.advance(10.0)

    await succeed(breaker)
    assert await asyncio.gather(*scheduled) == ["second probe"]

    assert [event.to_state for event in heard] == [OPEN, HALF_OPEN, CLOSED]


@pytest.mark.skipif(sys.version_info < (3, 12), reason="eager tasks came with Python 3.12")
async def test_a_listener_may_schedule_eager_tasks(breaker: CircuitBreaker, clock: FakeClock) -> None:
    heard: list[Transition] = []

    def reprobe(event: Transition) -> None:
        if event.to_state == HALF_OPEN:
            for _ in range(5):
                asyncio.create_task(breaker.call(ScriptedUpstream("eager"))).exception()

    breaker.add_listener(reprobe)
    breaker.add_listener(heard.append)
    await fail(breaker, times=3)
    clock.advance(10.0)
    loop = asyncio.get_running_loop()
    loop.set_task_factory(getattr(asyncio, "eager_task_factory"))  # noqa: B009 - unknown to a checker for 3.11

    assert await breaker.call(ScriptedUpstream("ok")) == "ok"

    loop.set_task_factory(None)
    assert [event.to_state for event in heard] == [OPEN, HALF_OPEN, CLOSED]
    assert breaker.snapshot().probes_in_flight == 0


async def test_transitions_that_a_listener_causes_at_once_are_told_after_its_own(
    breaker: CircuitBreaker, clock: FakeClock
) -> None:
    first: list[Transition] = []
    second: list[Transition] = []

    def drive(event: Transition) -> None:
        first.append(event)
        if event.to_state == HALF_OPEN:  # as an eager task would: the call runs to its end inside the callback
            with pytest.raises(UpstreamError):
                breaker.call(ScriptedUpstream(UpstreamError)).send(None)

    breaker.add_listener(drive)
    breaker.add_listener(second.append)
    await fail(breaker, times=3)
    clock.advance(10.0)

    await asyncio.gather(breaker.call(ScriptedUpstream("too late")), return_exceptions=True)

    assert [event.to_state for event in first] == [OPEN, HALF_OPEN, OPEN]
    assert second == first
    assert breaker.snapshot().probes_in_flight == 0


async def test_a_keyboard_interrupt_in_a_listener_comes_through_and_costs_no_probe(
    breaker: CircuitBreaker, clock: FakeClock
) -> None:
    def interrupted(event: Transition) -> None:
        if event.to_state == HALF_OPEN:
            raise KeyboardInterrupt

    breaker.add_listener(interrupted)
    await fail(breaker, times=3)
    clock.advance(10.0)
    with pytest.raises(KeyboardInterrupt):
        breaker.call(ScriptedUpstream()).send(None)

    await succeed(breaker, times=2)
    assert breaker.state == CLOSED


async def test_a_coroutine_function_is_refused_as_a_listener(breaker: CircuitBreaker) -> None:
    async def listener(event: Transition) -> None: ...

    with pytest.raises(TypeError, match="plain function"):
        breaker.add_listener(listener)


async def test_trip_restarts_the_timer_and_begins_a_new_generation(breaker: CircuitBreaker, clock: FakeClock) -> None:
    heard: list[Transition] = []
    breaker.add_listener(heard.append)
    await breaker.trip("first")
    clock.advance(9.0)
    await breaker.trip("second")

    assert breaker.snapshot().remaining_seconds == 10.0
    assert heard == [Transition(CLOSED, OPEN, 1, "first"), Transition(OPEN, OPEN, 2, "second")]


async def test_reset_clears_the_record_also_while_closed(breaker: CircuitBreaker) -> None:
    await fail(breaker, times=2)
    await breaker.reset()

    assert breaker.generation == 1
    assert breaker.snapshot().consecutive_failures == 0
    await fail(breaker, times=2)
    assert breaker.state == CLOSED
