"""What a call costs, as ratios with room; the figures themselves are in benchmarks/circuit_breaker.py."""

import time
import tracemalloc

from circuit_breaker import CircuitBreaker, CircuitBreakerConfig, CountWindow
from circuit_breaker.testing import FakeClock
from tests.circuit_breaker.support import fail, succeed


async def seconds(breaker: CircuitBreaker) -> float:
    """The fastest of many rounds: what a call costs when nothing else happens on the machine."""

    @breaker
    async def healthy() -> None: ...

    fastest = float("inf")
    for _ in range(50):
        started = time.perf_counter()
        for _ in range(500):
            await healthy()
        fastest = min(fastest, time.perf_counter() - started)
    return fastest


async def test_a_breaker_that_saw_failures_or_recovered_is_as_fast_as_a_new_one(clock: FakeClock) -> None:
    new, after_failures, recovered = (CircuitBreaker(name, clock=clock) for name in ("new", "failures", "recovered"))
    await fail(after_failures, times=2)
    await succeed(after_failures)
    await fail(recovered, times=3)
    clock.advance(10.0)
    await succeed(recovered, times=2)

    cost = await seconds(new)
    assert await seconds(after_failures) < 1.4 * cost
    assert await seconds(recovered) < 1.4 * cost


def test_a_breaker_with_a_window_of_100_takes_less_than_a_kibibyte_beside_its_config() -> None:
    config = CircuitBreakerConfig(window=CountWindow(size=100))
    names = [f"upstream-{number}" for number in range(1000)]
    tracemalloc.start()
    breakers = [CircuitBreaker(name, config) for name in names]
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert taken / len(breakers) < 1024
