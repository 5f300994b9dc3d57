"""The exceptions carry what the caller needs, survive a process boundary, and leave nothing behind."""

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from circuit_breaker import CircuitBreaker, CircuitBreakerError, CircuitBreakerOpenException
from circuit_breaker.testing import FakeClock, ScriptedUpstream
from tests.circuit_breaker.support import UpstreamError, fail

FIELDS = ("message", "circuit_name", "remaining_seconds", "backoff_seconds", "retry_after_seconds")


def test_the_articles_fields_and_defaults() -> None:
    bare = CircuitBreakerOpenException("Circuit OPEN")
    assert [getattr(bare, field) for field in FIELDS] == ["Circuit OPEN", None, 0.0, 0.0, 0.0]
    assert str(bare) == "Circuit OPEN"

    full = CircuitBreakerOpenException("Circuit OPEN", "payments", 1.5, 0.25)
    assert [getattr(full, field) for field in FIELDS] == ["Circuit OPEN", "payments", 1.5, 0.25, 1.75]
    assert str(full) == "Circuit OPEN, retry in 1.75 s"

    base = CircuitBreakerError("broken", "payments")
    assert (base.message, base.circuit_name, str(base)) == ("broken", "payments", "broken")
    assert isinstance(full, CircuitBreakerError)


@pytest.mark.parametrize(
    "duplicate",
    [
        copy.copy,
        copy.deepcopy,
        *(
            (lambda error, protocol=protocol: pickle.loads(pickle.dumps(error, protocol)))  # noqa: S301
            for protocol in range(pickle.HIGHEST_PROTOCOL + 1)
        ),
    ],
)
def test_a_copy_has_every_field(duplicate: Callable[[Any], Any]) -> None:
    for error in (
        CircuitBreakerOpenException("Circuit OPEN", "payments", 1.5, 0.25),
        CircuitBreakerOpenException(message="m", backoff_seconds=0.5, remaining_seconds=2.0, circuit_name="n"),
        CircuitBreakerOpenException("Circuit OPEN"),
    ):
        error.add_note("seen at the till")
        twin = duplicate(error)
        assert type(twin) is CircuitBreakerOpenException
        assert [getattr(twin, field) for field in FIELDS] == [getattr(error, field) for field in FIELDS]
        assert twin.__notes__ == ["seen at the till"]

    assert duplicate(CircuitBreakerError("broken", "payments")).circuit_name == "payments"


async def test_a_rejection_names_the_circuit_and_the_wait(breaker: CircuitBreaker) -> None:
    await fail(breaker, times=3)
    with pytest.raises(CircuitBreakerOpenException) as rejected:
        await breaker.call(ScriptedUpstream())

    error = rejected.value
    assert str(error) == f"circuit 'payments' is OPEN, retry in {error.retry_after_seconds:.2f} s"


async def test_a_rejection_holds_no_reference_to_its_breaker(breaker: CircuitBreaker) -> None:
    await breaker.trip()
    with pytest.raises(CircuitBreakerOpenException) as rejected:
        await breaker.call(ScriptedUpstream())

    # Without the traceback, whose frames are the caller's: plain values and nothing else.
    held = gc.get_referents(rejected.value.with_traceback(None))
    assert {type(value).__module__ for value in held} == {"builtins"}


async def rejection_of(breaker: CircuitBreaker) -> "weakref.ref[BaseException]":
    try:
        await breaker.call(ScriptedUpstream())
    except CircuitBreakerOpenException as error:
        return weakref.ref(error)
    pytest.fail("not rejected")


async def failure_of(breaker: CircuitBreaker) -> "weakref.ref[BaseException]":
    try:
        await breaker.call(ScriptedUpstream(UpstreamError))
    except UpstreamError as error:
        return weakref.ref(error)
    pytest.fail("did not fail")


async def failure_thrown_into_a_stream(breaker: CircuitBreaker) -> "weakref.ref[BaseException]":
    @breaker
    async def stream() -> Any:
        yield 1

    items = stream()
    await anext(items)
    try:
        await items.athrow(UpstreamError())
    except UpstreamError as error:
        return weakref.ref(error)
    pytest.fail("did not come back")


@pytest.mark.parametrize("state", ["CLOSED", "OPEN", "HALF_OPEN"])
async def test_no_reference_cycle_keeps_an_exception_alive_once_it_was_caught(
    state: str, breaker: CircuitBreaker, clock: FakeClock
) -> None:
    gc.collect()
    gc.disable()  # what is freed from here on is freed by its reference count alone
    try:
        if state == "CLOSED":
            assert (await failure_of(breaker))() is None
            assert (await failure_thrown_into_a_stream(breaker))() is None
        elif state == "OPEN":
            await breaker.trip()
            assert (await rejection_of(breaker))() is None
        else:
            await breaker.trip()
            clock.advance(10.0)
            async with breaker.guard(), breaker.guard():
                assert (await rejection_of(breaker))() is None
            await breaker.trip()
            clock.advance(10.0)
            assert (await failure_of(breaker))() is None
    finally:
        gc.enable()


async def test_a_dropped_breaker_is_freed_with_what_it_guards(clock: FakeClock) -> None:
    gc.collect()
    gc.disable()
    try:
        breaker = CircuitBreaker("dropped", clock=clock)
        guarded = breaker(ScriptedUpstream("ok").__call__)
        await guarded()
        await fail(breaker, times=3)
        ref = weakref.ref(breaker)
        del breaker, guarded
        assert ref() is None
    finally:
        gc.enable()
