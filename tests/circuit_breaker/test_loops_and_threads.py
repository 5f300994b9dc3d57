"""One breaker, several event loops: one after the other works, two at a time are refused."""

import asyncio
import threading
from typing import Any

import pytest

from circuit_breaker import CircuitBreaker, CircuitBreakerOpenException
from circuit_breaker.testing import FakeClock, Hold, ScriptedUpstream
from tests.circuit_breaker.support import CLOSED, OPEN, fail, succeed


def test_two_event_loops_in_a_row(breaker: CircuitBreaker, clock: FakeClock) -> None:
    asyncio.run(fail(breaker, times=3))
    clock.advance(10.0)
    asyncio.run(succeed(breaker, times=2))
    assert breaker.state == CLOSED


def test_an_event_loop_after_a_contended_half_open(breaker: CircuitBreaker, clock: FakeClock) -> None:
    async def contend() -> None:
        await fail(breaker, times=3)
        clock.advance(10.0)
        held = Hold()
        calls: list[asyncio.Task[Any]] = [asyncio.create_task(breaker.call(ScriptedUpstream(held))) for _ in range(50)]
        await asyncio.sleep(0)
        assert sum(call.done() for call in calls) == 48  # and the loop ends with two probes in flight

    asyncio.run(contend())
    assert breaker.snapshot().probes_in_flight == 0

    asyncio.run(succeed(breaker, times=2))
    assert breaker.state == CLOSED


def test_an_event_loop_in_another_thread_once_the_first_has_ended(breaker: CircuitBreaker, clock: FakeClock) -> None:
    asyncio.run(fail(breaker, times=3))
    clock.advance(10.0)
    worker = threading.Thread(target=asyncio.run, args=(succeed(breaker, times=2),))
    worker.start()
    worker.join()
    assert breaker.state == CLOSED


async def test_an_event_loop_in_another_thread_is_refused_meanwhile_and_changes_nothing(
    breaker: CircuitBreaker, clock: FakeClock
) -> None:
    await breaker.trip()
    clock.advance(10.0)
    before = breaker.snapshot()

    def elsewhere() -> None:
        for coroutine in (breaker.call(ScriptedUpstream()), breaker.trip(), breaker.reset()):
            with pytest.raises(RuntimeError, match="'payments' is in use by an event loop in another thread"):
                asyncio.run(coroutine)

    await asyncio.to_thread(elsewhere)

    assert breaker.snapshot() == before
    await succeed(breaker, times=2)
    assert breaker.state == CLOSED


async def test_a_finalizer_that_interrupts_a_transition_is_refused_and_does_not_wait_for_ever(
    breaker: CircuitBreaker,
) -> None:
    async with breaker._lock:  # as the garbage collector might: in the middle of a locked section
        with pytest.raises(RuntimeError, match="changing its state at this moment"):
            breaker.trip().send(None)

    await breaker.trip()
    assert breaker.state == OPEN


async def test_a_rejection_is_the_same_from_any_thread(breaker: CircuitBreaker) -> None:
    await breaker.trip()

    def elsewhere() -> None:
        with pytest.raises(CircuitBreakerOpenException):
            asyncio.run(breaker.call(ScriptedUpstream()))

    await asyncio.to_thread(elsewhere)


async def test_another_thread_may_schedule_on_the_breakers_loop(breaker: CircuitBreaker) -> None:
    loop = asyncio.get_running_loop()

    def elsewhere() -> None:
        asyncio.run_coroutine_threadsafe(breaker.trip("from a thread"), loop).result(timeout=5)

    await asyncio.to_thread(elsewhere)
    assert breaker.state == OPEN
