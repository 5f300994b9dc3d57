"""For tests of code that uses the breaker: time that moves when told to, and an upstream that does what it is told.

clock = FakeClock()
upstream = ScriptedUpstream(ConnectionError, ConnectionError, "ok")
breaker = CircuitBreaker("payments", CircuitBreakerConfig(failure_threshold=2), clock=clock)
...
clock.advance(10.0)     # the recovery time is over; nobody slept
"""

import asyncio
import inspect
from typing import Any


class FakeClock:
    """A monotonic clock that stands still until it is advanced. Pass it as `CircuitBreaker(..., clock=clock)`."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        """Let `seconds` pass. Raises ValueError when they are negative: no monotonic clock goes back."""
        if seconds < 0:
            raise ValueError(f"seconds ({seconds}) must not be negative")
        self.now += seconds


class Hold:
    """A step at which the call waits for `release()`; then it plays the step `then`."""

    def __init__(self, then: Any = None) -> None:
        self.then = then
        self._released = asyncio.Event()

    def release(self) -> None:
        """Let go every call that waits at this step, and every later one."""
        self._released.set()

    async def wait(self) -> None:
        """Return after `release()`."""
        await self._released.wait()


class Slow:
    """A step that takes `seconds` on the upstream's clock; then it plays the step `then`."""

    def __init__(self, seconds: float, then: Any = None) -> None:
        self.seconds = seconds
        self.then = then


class ScriptedUpstream:
    """An async callable that plays one step a call, and the last one for ever.

    A step is an exception (class or instance), which is raised; a `Hold` or a `Slow`; or anything else, which is
    returned. `calls` says how many calls reached the upstream. `clock` is needed for `Slow` steps.
    """

    def __init__(self, *steps: Any, clock: FakeClock | None = None) -> None:
        self.steps = list(steps) or [None]
        self.calls = 0
        self._clock = clock

    async def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Play the next step; the arguments are taken and not looked at."""
        step: Any = self.steps[min(self.calls, len(self.steps) - 1)]
        self.calls += 1
        while isinstance(step, Hold | Slow):
            if isinstance(step, Hold):
                await step.wait()
            elif self._clock is None:
                raise ValueError("a Slow step needs ScriptedUpstream(..., clock=FakeClock())")
            else:
                self._clock.advance(step.seconds)
            step = step.then
        if isinstance(step, BaseException):
            raise step
        if inspect.isclass(step) and issubclass(step, BaseException):
            raise step()
        return step
