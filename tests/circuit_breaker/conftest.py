"""What every test file here starts from: a clock that stands still, and the breaker's log."""

import logging
from collections.abc import Callable

import pytest

from circuit_breaker import CircuitBreaker, CircuitBreakerConfig
from circuit_breaker.testing import FakeClock

Log = Callable[[], list[str]]


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def breaker(clock: FakeClock) -> CircuitBreaker:
    """Trips at the third failure, recovers after 10 s, takes 2 probes."""
    return CircuitBreaker("payments", CircuitBreakerConfig(), clock=clock)


@pytest.fixture
def events(caplog: pytest.LogCaptureFixture) -> Log:
    """The events logged so far, in order."""
    caplog.set_level(logging.DEBUG, logger="circuit_breaker")

    def names() -> list[str]:
        return [record.message for record in caplog.records if record.name.startswith("circuit_breaker")]

    return names
