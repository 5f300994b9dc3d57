"""The public test helpers behave as their users expect."""

import asyncio

import pytest

from circuit_breaker.testing import FakeClock, Hold, ScriptedUpstream, Slow


def test_the_clock_moves_only_when_told_to() -> None:
    clock = FakeClock(5.0)
    assert (clock(), clock()) == (5.0, 5.0)
    clock.advance(2.5)
    assert clock() == 7.5
    with pytest.raises(ValueError, match="must not be negative"):
        clock.advance(-1.0)


async def test_the_upstream_plays_its_steps_and_then_the_last_one_for_ever() -> None:
    upstream = ScriptedUpstream("first", ValueError, KeyError("second"), "last")
    assert await upstream(1, two=2) == "first"
    with pytest.raises(ValueError, match=r"^$"):
        await upstream()
    with pytest.raises(KeyError, match="second"):
        await upstream()
    assert [await upstream() for _ in range(3)] == ["last"] * 3
    assert upstream.calls == 6


async def test_an_upstream_without_a_script_returns_none() -> None:
    assert await ScriptedUpstream()() is None


async def test_a_slow_step_takes_its_time_on_the_fake_clock_and_nothing_else() -> None:
    clock = FakeClock(0.0)
    upstream = ScriptedUpstream(Slow(30.0, then="late"), clock=clock)
    assert await upstream() == "late"
    assert clock() == 30.0
    with pytest.raises(ValueError, match="clock=FakeClock"):
        await ScriptedUpstream(Slow(1.0))()


async def test_a_hold_waits_for_its_release() -> None:
    hold = Hold(then=ValueError)
    call = asyncio.create_task(ScriptedUpstream(hold)())
    await asyncio.sleep(0)
    assert not call.done()
    hold.release()
    with pytest.raises(ValueError, match=r"^$"):
        await call
