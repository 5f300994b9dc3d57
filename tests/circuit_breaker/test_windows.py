"""Sliding windows see the brownouts to which a streak is blind (article, Section 7)."""

import time
from typing import Any

import pytest
from hypothesis import given, strategies
from pydantic import ValidationError

from circuit_breaker import CircuitBreaker, CircuitBreakerConfig, CountWindow, Outcome, TimeWindow
from circuit_breaker.sliding_window import SlidingWindow
from circuit_breaker.testing import FakeClock, ScriptedUpstream, Slow
from tests.circuit_breaker.support import CLOSED, OPEN, fail, succeed


def guarded_by(window: CountWindow | TimeWindow | None, clock: FakeClock) -> CircuitBreaker:
    return CircuitBreaker("window", CircuitBreakerConfig(failure_threshold=4, window=window), clock=clock)


def trips(window: SlidingWindow, outcomes: str, now: float = 0.0) -> int | None:
    """The number of the call that trips it ("x" fails), or None."""
    for number, outcome in enumerate(outcomes, start=1):
        if window.record(now, 0.0, outcome == "x"):
            return number
    return None


@pytest.mark.parametrize("window", [CountWindow(size=20), TimeWindow(seconds=60.0, minimum_calls=20)])
async def test_a_brownout_with_a_success_every_fourth_call_trips_the_window_and_not_the_streak(
    window: CountWindow | TimeWindow, clock: FakeClock
) -> None:
    by_window, by_streak = guarded_by(window, clock), guarded_by(None, clock)
    for _ in range(4):
        for breaker in (by_window, by_streak):
            await fail(breaker, times=3)
            await succeed(breaker)
        clock.advance(1.0)
    assert by_window.state == CLOSED  # sixteen calls: the minimum is twenty

    for breaker in (by_window, by_streak):
        await fail(breaker, times=3)
        if breaker is by_streak:
            await succeed(breaker)
    with pytest.raises(Exception, match="OPEN"):
        await succeed(by_window, times=2)
    assert by_window.state == OPEN
    assert by_streak.state == CLOSED


@pytest.mark.parametrize(
    ("config", "outcomes", "call"),
    [
        (CountWindow(size=10, minimum_calls=5), "xxxx", None),
        (CountWindow(size=10, minimum_calls=5), "xxxxx", 5),
        (CountWindow(size=10, minimum_calls=5), "xxxx.", 5),  # also a success may complete the minimum
        (CountWindow(size=10), "xxxxxxxxx", None),  # by default nothing is judged before the window is full
        (CountWindow(size=10), "xxxxxxxxxx", 10),
        (CountWindow(size=4), "xx..", None),  # half failed: not above a half
        (CountWindow(size=4), "xx..x", None),  # the oldest failure left
        (CountWindow(size=4), "x..xxx", 6),
        (CountWindow(size=4, failure_rate=0.0), "...x", 4),
        (CountWindow(size=4, failure_rate=1.0), "xxxxxxxx", None),
        (CountWindow(size=100, failure_rate=0.29), "x" * 29 + "." * 71, None),  # 29 % in binary is below 29 / 100
        (CountWindow(size=100, failure_rate=0.29), "." * 70 + "x" * 30, 100),
        (CountWindow(size=1), "x", 1),
        (TimeWindow(seconds=10.0, minimum_calls=4), "xxx", None),
        (TimeWindow(seconds=10.0, minimum_calls=4), "xxx.", 4),
    ],
)
def test_the_rate_above_the_limit_trips_and_the_minimum_holds(
    config: CountWindow | TimeWindow, outcomes: str, call: int | None
) -> None:
    assert trips(config.start(), outcomes) == call


async def test_slow_successes_trip(clock: FakeClock) -> None:
    window = CountWindow(size=4, slow_call_seconds=1.0, slow_call_rate=0.5)
    breaker = guarded_by(window, clock)
    upstream = ScriptedUpstream(Slow(1.0), Slow(0.9), Slow(2.0), Slow(1.5), clock=clock)
    for _ in range(3):
        await breaker.call(upstream)
    assert breaker.state == CLOSED

    await breaker.call(upstream)
    assert breaker.state == OPEN
    assert breaker.snapshot().slow_call_rate == 0.75
    assert breaker.snapshot().failure_rate == 0.0


async def test_a_window_starts_empty_after_every_recovery(clock: FakeClock) -> None:
    breaker = guarded_by(CountWindow(size=4, minimum_calls=2), clock)
    await fail(breaker, times=2)
    clock.advance(10.0)
    await succeed(breaker, times=2)
    assert breaker.state == CLOSED
    assert breaker.snapshot().window_calls == 0


async def test_alive_and_ignored_calls_are_not_in_the_window(clock: FakeClock) -> None:
    config = CircuitBreakerConfig(window=CountWindow(size=4))
    breaker = CircuitBreaker("alive", config, classify=lambda result, error: result, clock=clock)
    for outcome in (Outcome.ALIVE, Outcome.IGNORED, Outcome.SUCCESS, Outcome.FAILURE):
        await breaker.call(ScriptedUpstream(outcome))
    assert breaker.snapshot().window_calls == 2
    assert breaker.snapshot().failure_rate == 0.5


async def test_time_buckets_expire_also_with_no_traffic(clock: FakeClock) -> None:
    breaker = guarded_by(TimeWindow(seconds=10.0, minimum_calls=4), clock)
    await fail(breaker, times=3)
    assert breaker.snapshot().window_calls == 3

    clock.advance(5.0)
    assert breaker.snapshot().window_calls == 3
    clock.advance(5.0)
    assert breaker.snapshot().window_calls == 0

    await fail(breaker, times=3)
    assert breaker.state == CLOSED


@pytest.mark.parametrize("pause", [0.0, 0.5, 1.0, 3.7, 9.9, 10.0, 25.0, 1e6])
def test_a_time_window_counts_what_a_list_of_all_calls_would_count(pause: float) -> None:
    window = TimeWindow(seconds=10.0, minimum_calls=1, failure_rate=1.0).start()
    calls: list[tuple[float, bool]] = []
    now = 123.4
    for number in range(200):
        failed = number % 3 == 0
        window.record(now, 0.0, failed)
        calls.append((now, failed))
        live = [(at, bad) for at, bad in calls if int(at) > int(now) - 10]  # buckets of one second
        assert (window.calls, window.failed) == (len(live), sum(bad for _, bad in live))
        now += pause if number % 7 == 0 else 0.3


async def test_a_wall_clock_jump_has_no_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    breaker = CircuitBreaker("wall", CircuitBreakerConfig(window=TimeWindow(seconds=60.0, minimum_calls=3)))
    await fail(breaker, times=2)
    for year in (0.0, 4e9):
        monkeypatch.setattr(time, "time", lambda year=year: year)
        assert breaker.snapshot().window_calls == 2

    await fail(breaker)
    remaining = breaker.snapshot().remaining_seconds
    monkeypatch.setattr(time, "time", lambda: 8e9)
    assert breaker.state == OPEN
    assert breaker.snapshot().remaining_seconds == pytest.approx(remaining, abs=5.0)


@given(
    size=strategies.integers(1, 6),
    calls=strategies.lists(strategies.tuples(strategies.booleans(), strategies.booleans()), max_size=40),
)
def test_a_count_window_counts_what_a_list_of_the_last_calls_would_count(
    size: int, calls: list[tuple[bool, bool]]
) -> None:
    window = CountWindow(size=size, slow_call_seconds=1.0, failure_rate=1.0).start()
    for number, (failed, slow) in enumerate(calls, start=1):
        window.record(0.0, 1.0 if slow else 0.5, failed)
        last = calls[:number][-size:]
        assert (window.calls, window.failed, window.slow) == (
            len(last),
            sum(failed for failed, _ in last),
            sum(slow for _, slow in last),
        )


def test_a_clock_that_falls_back_counts_as_standing_still() -> None:
    window = TimeWindow(seconds=10.0, minimum_calls=100).start()
    window.record(50.0, 0.0, True)
    window.record(49.0, 0.0, True)
    window.expire(59.0)
    assert (window.calls, window.failed) == (2, 2)
    window.expire(60.0)
    assert (window.calls, window.failed) == (0, 0)


def test_a_pause_of_any_length_costs_at_most_ten_buckets() -> None:
    window = TimeWindow(seconds=10.0).start()
    window.record(0.0, 0.0, True)
    window.expire(1e15)  # bucket by bucket this would not end
    assert window.calls == 0


def test_a_call_costs_the_same_in_a_window_a_thousand_times_larger() -> None:
    def seconds(window: SlidingWindow) -> float:
        started = time.perf_counter()
        for _ in range(20_000):
            window.record(0.0, 0.0, True)
        return time.perf_counter() - started

    small, large = CountWindow(size=100, failure_rate=1.0), CountWindow(size=100_000, failure_rate=1.0)
    ratios = sorted(seconds(large.start()) / seconds(small.start()) for _ in range(9))
    assert ratios[4] < 3.0  # a sum over the window would make it hundreds


@pytest.mark.parametrize(
    ("window", "settings", "field"),
    [
        (CountWindow, {"size": 0}, "size"),
        (CountWindow, {"size": 10, "minimum_calls": 11}, "minimum_calls"),
        (CountWindow, {"minimum_calls": 0}, "minimum_calls"),
        (CountWindow, {"failure_rate": 1.1}, "failure_rate"),
        (CountWindow, {"failure_rate": float("nan")}, "failure_rate"),
        (CountWindow, {"slow_call_seconds": 0.0}, "slow_call_seconds"),
        (CountWindow, {"slow_call_rate": -0.1}, "slow_call_rate"),
        (CountWindow, {"seconds": 10}, "seconds"),
        (TimeWindow, {"seconds": 0.0}, "seconds"),
        (TimeWindow, {"seconds": float("inf")}, "seconds"),
        (TimeWindow, {"minimum_calls": 0}, "minimum_calls"),
        (TimeWindow, {"size": 10}, "size"),
    ],
)
def test_a_bad_window_is_refused_and_the_field_is_named(window: Any, settings: dict[str, Any], field: str) -> None:
    with pytest.raises(ValidationError) as refused:
        window(**settings)
    assert [error["loc"] for error in refused.value.errors()] == [(field,)]
