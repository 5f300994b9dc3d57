"""However a probe ends, it gives its place back or has used it up; none is ever lost."""

import asyncio
import gc
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from circuit_breaker import CircuitBreaker, CircuitBreakerConfig, CircuitBreakerOpenException
from circuit_breaker.testing import FakeClock, Hold, ScriptedUpstream
from tests.circuit_breaker.conftest import Log
from tests.circuit_breaker.support import CLOSED, HALF_OPEN, OPEN, UpstreamError, fail, succeed

Ending = Callable[[CircuitBreaker], Awaitable[None]]


class CallersError(Exception):
    """Not among the expected exceptions."""


class StubbornError(BaseException):
    """Neither an Exception nor one of asyncio's."""


@pytest.fixture
async def probing(clock: FakeClock) -> CircuitBreaker:
    """The recovery time is over, and a single place is free: a lost one would close the circuit for good."""
    config = CircuitBreakerConfig(half_open_max_calls=1, expected_exceptions=(UpstreamError,))
    breaker = CircuitBreaker("slots", config, clock=clock)
    await fail(breaker, times=3)
    clock.advance(10.0)
    return breaker


async def cancelled(breaker: CircuitBreaker) -> None:
    task: asyncio.Task[Any] = asyncio.create_task(breaker.call(ScriptedUpstream(Hold())))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()


async def cancelled_twice(breaker: CircuitBreaker) -> None:
    async def slow_to_let_go() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.Event().wait()

    task = asyncio.create_task(breaker.call(slow_to_let_go))
    for _ in range(2):
        await asyncio.sleep(0)
        task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()


async def cancelled_before_it_first_runs(breaker: CircuitBreaker) -> None:
    upstream = ScriptedUpstream()
    task: asyncio.Task[Any] = asyncio.create_task(breaker.call(upstream))
    task.cancel()
    await asyncio.wait([task])
    assert upstream.calls == 0


async def never_started(breaker: CircuitBreaker) -> None:
    breaker.call(ScriptedUpstream()).close()


async def ended_by_an_ignored_exception(breaker: CircuitBreaker) -> None:
    with pytest.raises(CallersError):
        await breaker.call(ScriptedUpstream(CallersError))


async def ended_by_generator_exit(breaker: CircuitBreaker) -> None:
    coroutine = breaker.call(ScriptedUpstream(Hold()))
    coroutine.send(None)
    coroutine.close()


async def forgotten_and_collected(breaker: CircuitBreaker) -> None:
    coroutine = breaker.call(ScriptedUpstream(Hold()))
    coroutine.send(None)
    del coroutine
    gc.collect()


async def ended_by_keyboard_interrupt(breaker: CircuitBreaker) -> None:
    coroutine = breaker.call(ScriptedUpstream(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        coroutine.send(None)


async def ended_by_any_base_exception(breaker: CircuitBreaker) -> None:
    with pytest.raises(StubbornError):
        await breaker.call(ScriptedUpstream(StubbornError))


async def ended_by_asyncio_timeout(breaker: CircuitBreaker) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await breaker.call(ScriptedUpstream(Hold()))


async def ended_by_wait_for(breaker: CircuitBreaker) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(breaker.call(ScriptedUpstream(Hold())), timeout=0.001)


async def cancelled_under_guard(breaker: CircuitBreaker) -> None:
    async def guarded() -> None:
        async with breaker.guard():
            await asyncio.Event().wait()

    task = asyncio.create_task(guarded())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()


async def closed_under_guard(breaker: CircuitBreaker) -> None:
    hold = Hold()

    async def guarded() -> None:
        async with breaker.guard():
            await hold.wait()

    coroutine = guarded()
    coroutine.send(None)
    coroutine.close()


ENDINGS = [
    cancelled,
    cancelled_twice,
    cancelled_before_it_first_runs,
    never_started,
    ended_by_an_ignored_exception,
    ended_by_generator_exit,
    forgotten_and_collected,
    ended_by_keyboard_interrupt,
    ended_by_any_base_exception,
    ended_by_asyncio_timeout,
    ended_by_wait_for,
    cancelled_under_guard,
    closed_under_guard,
]


@pytest.mark.parametrize("ending", ENDINGS)
async def test_after_a_probe_that_says_nothing_the_next_one_is_admitted_and_a_good_one_closes(
    ending: Ending, probing: CircuitBreaker
) -> None:
    for _ in range(3):
        await ending(probing)
        assert probing.snapshot().probes_in_flight == 0

    await succeed(probing)
    assert probing.state == CLOSED


@pytest.mark.parametrize("ending", ENDINGS)
async def test_in_closed_such_a_call_neither_counts_nor_ends_a_streak(ending: Ending, clock: FakeClock) -> None:
    config = CircuitBreakerConfig(failure_threshold=2, expected_exceptions=(UpstreamError,))
    breaker = CircuitBreaker("slots", config, clock=clock)
    await fail(breaker)

    await ending(breaker)

    assert breaker.snapshot().consecutive_failures == 1
    await fail(breaker)
    assert breaker.state == OPEN


async def test_a_hung_probe_is_found_by_the_next_call_which_is_rejected_and_open_starts_then(
    probing: CircuitBreaker, clock: FakeClock, events: Log
) -> None:
    hung: asyncio.Task[Any] = asyncio.create_task(probing.call(ScriptedUpstream(Hold())))
    await asyncio.sleep(0)
    clock.advance(9.9)
    with pytest.raises(CircuitBreakerOpenException):
        await succeed(probing)
    assert probing.state == HALF_OPEN  # it may still come back

    clock.advance(0.1)
    upstream = ScriptedUpstream()
    with pytest.raises(CircuitBreakerOpenException) as rejected:
        await probing.call(upstream)

    assert upstream.calls == 0
    assert rejected.value.remaining_seconds == 10.0
    assert probing.state == OPEN
    assert events()[-3:] == ["probe_timed_out", "state_transition_half_open_to_open", "call_rejected_circuit_open"]
    clock.advance(10.0)
    await succeed(probing)
    assert probing.state == CLOSED
    hung.cancel()


async def test_the_limit_of_a_hung_probe_counts_from_its_own_admission(clock: FakeClock) -> None:
    config = CircuitBreakerConfig(half_open_max_calls=3, half_open_timeout_seconds=5.0)
    breaker = CircuitBreaker("hung", config, clock=clock)
    await fail(breaker, times=3)
    clock.advance(10.0)
    await succeed(breaker)
    clock.advance(4.0)
    hung: asyncio.Task[Any] = asyncio.create_task(breaker.call(ScriptedUpstream(Hold())))
    await asyncio.sleep(0)
    clock.advance(4.0)  # 8 s into HALF_OPEN, 4 s into the probe

    third = Hold(then="ok")
    probe: asyncio.Task[Any] = asyncio.create_task(breaker.call(ScriptedUpstream(third)))
    await asyncio.sleep(0)
    assert breaker.snapshot().probes_in_flight == 2

    clock.advance(1.0)
    with pytest.raises(CircuitBreakerOpenException):
        await succeed(breaker)
    assert breaker.state == OPEN
    hung.cancel()
    third.release()
    await probe


async def test_a_hung_probe_is_found_even_while_places_are_free(breaker: CircuitBreaker, clock: FakeClock) -> None:
    await fail(breaker, times=3)
    clock.advance(10.0)
    hung: asyncio.Task[Any] = asyncio.create_task(breaker.call(ScriptedUpstream(Hold())))
    await asyncio.sleep(0)
    clock.advance(10.0)

    with pytest.raises(CircuitBreakerOpenException):
        await succeed(breaker)

    assert breaker.state == OPEN
    hung.cancel()


async def test_a_probe_settles_without_suspending(probing: CircuitBreaker) -> None:
    coroutine = probing.call(ScriptedUpstream("ok"))
    with pytest.raises(StopIteration) as finished:
        coroutine.send(None)  # admission, call and settlement in one step of the event loop

    assert finished.value.value == "ok"
    assert probing.state == CLOSED


async def test_a_guard_admits_once_for_each_entry(breaker: CircuitBreaker, clock: FakeClock) -> None:
    await fail(breaker, times=3)
    clock.advance(10.0)
    async with breaker.guard():
        assert breaker.snapshot().probes_in_flight == 1
        async with breaker.guard():
            assert breaker.snapshot().probes_in_flight == 2
            with pytest.raises(CircuitBreakerOpenException):
                async with breaker.guard():
                    pytest.fail("a third probe entered")
    assert breaker.state == CLOSED
