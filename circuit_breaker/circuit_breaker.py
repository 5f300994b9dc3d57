"""The state machine, its three doors, and the decorator (article, Sections 1, 2, 4.3 and 4.4).

Every call passes `_before_call` and then `_on_success` or `_on_failure`; every change of state is a `_transition`.
Each transition begins a new *generation*, and a result counts only in the generation that admitted its call. Without
that, a call that hung through the whole outage would come back and close, or trip, a circuit it knows nothing about.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import math
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, ParamSpec, TypeVar, cast, overload

from circuit_breaker.config import CircuitBreakerConfig
from circuit_breaker.exceptions import CircuitBreakerError, CircuitBreakerOpenException
from circuit_breaker.guarded_stream import guard_stream
from circuit_breaker.states import CircuitState, Outcome, Snapshot, Transition
from circuit_breaker.telemetry import JsonStructuredFormatter

__all__ = [
    "CircuitBreaker",
    "CircuitBreakerConfig",
    "CircuitBreakerError",
    "CircuitBreakerOpenException",
    "CircuitState",
    "JsonStructuredFormatter",
    "Outcome",
    "Snapshot",
    "Transition",
    "circuit_breaker",
]

P = ParamSpec("P")
R = TypeVar("R")
Guarded = TypeVar("Guarded", bound=Awaitable[Any] | AsyncIterator[Any])
Classifier = Callable[[Any, Exception | None], Outcome]
Settle = Callable[[Outcome, BaseException | None], Awaitable[None]]

CLOSED, OPEN, HALF_OPEN = CircuitState.CLOSED, CircuitState.OPEN, CircuitState.HALF_OPEN
SUCCESS, FAILURE, ALIVE, IGNORED = Outcome.SUCCESS, Outcome.FAILURE, Outcome.ALIVE, Outcome.IGNORED

logger = logging.getLogger(__name__)
DEBUG = logging.DEBUG
is_logged = logger.isEnabledFor


class CircuitBreaker:
    """Stops calling an upstream that fails, and probes carefully whether it is back.

    `name` appears in logs and exceptions. `classify(result, error)` says what a finished call means (default: a
    result is a SUCCESS, an error a FAILURE); exactly one of the two is not None, unless the result is None itself.
    `clock` returns monotonic seconds.

    One breaker serves one event loop at a time, several one after the other. A second loop that runs in another thread
    is refused with a RuntimeError as soon as it would take the lock; from there, schedule on the breaker's own loop
    (`asyncio.run_coroutine_threadsafe`). `state` and `generation` may be read from anywhere.
    """

    def __init__(
        self,
        name: str,
        config: CircuitBreakerConfig | None = None,
        *,
        classify: Classifier | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not isinstance(name, str) or not name:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"name must be a non-empty string, not {name!r}")
        if not isinstance(config, CircuitBreakerConfig | None):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"config must be a CircuitBreakerConfig, not {config!r}")
        if inspect.iscoroutinefunction(classify):
            raise TypeError("classify must be a plain function: a call is settled without suspending")
        self.name = name
        self.config = config or CircuitBreakerConfig()
        self._classify = classify
        self._clock = clock
        # Copies: a pydantic attribute costs several times a plain one, and an open circuit reads three a call.
        self._recovery_time = self.config.recovery_time_seconds
        self._base_backoff = self.config.base_backoff
        self._max_backoff = self.config.max_backoff
        self._half_open_timeout = self.config.half_open_timeout_seconds or self.config.recovery_time_seconds
        # The attempt from which 2 ** attempt is beyond max_backoff, and soon after that beyond any float.
        self._max_backoff_from = math.ceil(math.log2(self._max_backoff) - math.log2(self._base_backoff))
        # No section that holds this lock suspends. So nobody ever waits for it, it binds to no event loop, and what
        # was checked before acquiring it still holds after.
        self._lock = asyncio.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._state = CLOSED
        self._generation = 0
        self._steady = -1  # the generation, once a success has left nothing in it for the next one to change
        self._consecutive_failures = 0
        self._retry_attempt = 0
        self._rejections = 0
        self._open_message = f"circuit {name!r} is OPEN"
        self._opened_at = 0.0
        self._probes: list[float] = []  # when each running probe was admitted, oldest first
        self._half_open_successes = 0
        self._window = self.config.window.start() if self.config.window else None
        self._listeners: tuple[Callable[[Transition], object], ...] = ()
        self._undelivered: list[Transition] = []
        self._notifying = False

    # --- the state machine ---------------------------------------------------------------------------------------

    async def _before_call(self, now: float) -> int:
        """Admit a call that arrives at `now`, or raise CircuitBreakerOpenException. Returns its generation."""
        if self._state is CLOSED:
            return self._generation
        if self._state is OPEN:
            if (remaining := self._opened_at + self._recovery_time - now) > 0.0:
                raise self._rejection(remaining)
            await self._transition(HALF_OPEN, "recovery_time_elapsed", now)
        elif self._probes and now - self._probes[0] >= self._half_open_timeout:
            self._log(logging.WARNING, "probe_timed_out", latency_ms=(now - self._probes[0]) * 1000)
            await self._transition(OPEN, "probe_timed_out", now)
        async with self._own_lock():
            # In total, not at once: the article's listing counts those in flight, so each that ends lets one more in.
            places_taken = len(self._probes) + self._half_open_successes
            if self._state is OPEN or places_taken >= self.config.half_open_max_calls:
                raise self._rejection(self._recovery_time if self._state is OPEN else 0.0)
            if self._state is HALF_OPEN:  # and not CLOSED by the calls of a listener, which an eager task runs at once
                self._probes.append(now)
            return self._generation

    async def _on_success(self, generation: int, started: float, now: float, outcome: Outcome) -> None:
        """Count a SUCCESS or an ALIVE of a call that ran from `started` to `now`."""
        latency_ms = (now - started) * 1000
        if generation != self._generation:
            self._log(logging.INFO, "stale_result_ignored", latency_ms=latency_ms)
            return
        to_state, cause = None, None
        if self._state is HALF_OPEN:
            self._probes.remove(started)
            self._half_open_successes += 1
            if self._half_open_successes == self.config.half_open_max_calls:
                to_state, cause = CLOSED, "probes_succeeded"
        elif outcome is SUCCESS:
            self._consecutive_failures = self._retry_attempt = 0
            self._steady = generation
            if self._window and (cause := self._window.record(now, now - started, False)):
                to_state = OPEN
        if to_state and cause:
            await self._transition(to_state, cause, now, latency_ms=latency_ms)
        else:
            self._log(DEBUG, "call_succeeded", latency_ms=latency_ms)

    async def _on_failure(self, generation: int, started: float, now: float, error: BaseException | None) -> None:
        """Count a FAILURE; `error` is None when it was returned and not raised."""
        details: dict[str, Any] = {
            "latency_ms": (now - started) * 1000,
            "error_type": type(error).__name__ if error else None,
        }
        if generation != self._generation:
            self._log(logging.INFO, "stale_result_ignored", **details)
            return
        details["backoff_seconds"] = self.calculate_backoff()
        self._retry_attempt += 1
        self._consecutive_failures += 1
        self._steady = -1
        cause: str | None = None
        if self._state is HALF_OPEN:
            cause = "probe_failed"
        elif self._window:
            cause = self._window.record(now, now - started, True)
        elif self._consecutive_failures >= self.config.failure_threshold:
            cause = "failure_threshold"
        if cause:
            await self._transition(OPEN, cause, now, **details)
        else:
            self._log(logging.WARNING, "call_failed", **details)

    async def _transition(self, to_state: CircuitState, cause: str, now: float, **details: Any) -> None:
        """Begin a new generation in `to_state`, then tell the listeners."""
        async with self._own_lock():
            from_state, self._state = self._state, to_state
            self._generation += 1
            self._steady = -1
            self._probes.clear()
            self._half_open_successes = 0
            if self._rejections > 1:
                details["rejected_calls"] = self._rejections - 1  # the first had its own line
            self._rejections = 0
            if to_state is OPEN:
                self._opened_at = now
            if to_state is CLOSED:
                self._consecutive_failures = self._retry_attempt = 0
                if self._window:
                    self._window.clear()
            level = logging.ERROR if to_state is OPEN else logging.INFO
            event = f"state_transition_{from_state.lower()}_to_{to_state.lower()}"
            self._log(level, event, cause=cause, **details)
            self._undelivered.append(Transition(from_state, to_state, self._generation, cause))
        self._notify()

    def _release(self, generation: int, started: float) -> None:
        """An IGNORED call: as if it had never been admitted."""
        # No lock: the garbage collector may close a forgotten coroutine, and so run this, inside a locked section.
        if generation == self._generation and self._state is HALF_OPEN:
            self._probes.remove(started)

    # --- the public face -----------------------------------------------------------------------------------------

    @property
    def state(self) -> CircuitState:
        """OPEN also when the recovery time is over: it is the next call that makes it HALF_OPEN."""
        return self._state

    @property
    def generation(self) -> int:
        """How many transitions there were."""
        return self._generation

    @property
    def has_clean_record(self) -> bool:
        """CLOSED with nothing on record against the upstream: a new breaker would do as well."""
        seen = self.snapshot()
        return seen.state is CLOSED and not (seen.consecutive_failures or seen.failure_rate or seen.slow_call_rate)

    def snapshot(self) -> Snapshot:
        """All of the breaker's state at this moment."""
        now = self._clock()
        if window := self._window:
            window.expire(now)
        return Snapshot(
            name=self.name,
            state=self._state,
            generation=self._generation,
            consecutive_failures=self._consecutive_failures,
            half_open_successes=self._half_open_successes,
            probes_in_flight=len(self._probes),
            retry_attempt=self._retry_attempt,
            remaining_seconds=max(0.0, self._opened_at + self._recovery_time - now) if self._state is OPEN else 0.0,
            window_calls=window.calls if window else None,
            failure_rate=window.failed / max(window.calls, 1) if window else None,
            slow_call_rate=window.slow / max(window.calls, 1) if window else None,
        )

    def call(self, func: Callable[P, Awaitable[R]], /, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R]:
        """Await `func(*args, **kwargs)` under guard and return its result.

        Raises CircuitBreakerOpenException when rejected, and otherwise what `func` raises. The call is admitted when
        the coroutine first runs, so one that is never awaited takes no place.
        """
        return self._guard_function(func)(*args, **kwargs)

    def __call__(self, func: Callable[P, Guarded]) -> Callable[P, Guarded]:
        """Guard a coroutine function, or an async generator function for its whole life (article, Section 4.4).

        Name, signature and type stay; `.breaker` is this breaker. Raises TypeError for any other function.
        """
        target: Any = func
        if type(target) in (classmethod, staticmethod):  # applied below this decorator
            return cast("Callable[P, Guarded]", type(target)(self(target.__func__)))
        if _is_a(inspect.iscoroutinefunction, target):
            guarded: Callable[..., Any] = self._guard_function(target)
        elif _is_a(inspect.isasyncgenfunction, target):
            guarded = guard_stream(self, target)
        else:
            raise TypeError(
                f"circuit breaker {self.name!r} cannot guard {func!r}: it is neither a coroutine function nor an async "
                "generator function. Declare it with `async def`, or await `breaker.call(func, ...)` if it returns an "
                "awaitable."
            )
        functools.update_wrapper(guarded, func)
        vars(guarded)["breaker"] = self
        return cast("Callable[P, Guarded]", guarded)

    @asynccontextmanager
    async def guard(self) -> AsyncGenerator[None, None]:
        """Guard the body of an `async with`: one admission for each entry. `classify` is asked about errors alone."""
        settle = await self.admit()
        try:
            yield
        except BaseException as error:
            await settle(self.judge(None, error), error)
            raise
        await settle(SUCCESS, None)

    async def trip(self, reason: str = "tripped_by_hand") -> None:
        """Open the circuit now and (re)start the recovery timer. What is in flight no longer counts."""
        await self._transition(OPEN, reason, self._clock())

    async def reset(self) -> None:
        """Close the circuit now, with a clean record. What is in flight no longer counts."""
        await self._transition(CLOSED, "reset_by_hand", self._clock())

    def add_listener(self, callback: Callable[[Transition], object]) -> None:
        """Have `callback` told of every transition, in order, right after it, before anything else can run.

        A plain function: it must not block. One that raises is logged and changes nothing.
        """
        if inspect.iscoroutinefunction(callback):
            raise TypeError("a listener is a plain function; let it create a task for what it has to await")
        self._listeners += (callback,)

    def calculate_backoff(self, retry_attempt: int | None = None) -> float:
        """Full-jitter delay in seconds: uniform in [0, min(max_backoff, base_backoff * 2 ** attempt)] (Section 2).

        The attempt is the breaker's own, which grows with each failure and each rejection, unless one is given.
        """
        attempt = self._retry_attempt if retry_attempt is None else max(0, retry_attempt)
        cap = self._max_backoff
        if attempt < self._max_backoff_from:  # The article's listing overflows here after 1,021 rejections.
            cap = min(cap, math.ldexp(self._base_backoff, attempt))
        return random.random() * cap  # noqa: S311 - jitter, not a secret

    # --- calls that are not one function, such as a response with its body ---------------------------------------

    async def admit(self) -> Settle:
        """Admit one call and return the `settle(outcome, error)` to await exactly once, whatever becomes of the call.

        Raises CircuitBreakerOpenException when the call is rejected. `settle` never suspends.
        """
        started = self._clock()
        generation = await self._before_call(started)

        async def settle(outcome: Outcome, error: BaseException | None) -> None:
            await self._settle(generation, started, self._clock(), outcome, error)

        return settle

    def judge(self, result: Any, error: BaseException | None) -> Outcome:
        """What a call that ended with this result, or this error, says about the upstream. Never raises."""
        if error is not None and not isinstance(error, self.config.expected_exceptions):
            return IGNORED
        if self._classify is None:
            return SUCCESS if error is None else FAILURE
        try:
            return Outcome(self._classify(result, error))
        except Exception:
            self._log(logging.ERROR, "classify_failed", exc_info=True)
            return FAILURE

    async def _settle(
        self, generation: int, started: float, now: float, outcome: Outcome, error: BaseException | None = None
    ) -> None:
        if outcome is IGNORED:
            self._release(generation, started)
        elif outcome is FAILURE:
            await self._on_failure(generation, started, now, error)
        else:
            await self._on_success(generation, started, now, outcome)

    # --- how functions are wrapped -------------------------------------------------------------------------------

    def _guard_function(self, func: Callable[..., Awaitable[R]]) -> Callable[..., Coroutine[Any, Any, R]]:
        """One coroutine around each call, and the two outcomes that most calls have spelled out: they pay for speed."""
        clock, window = self._clock, self._window
        unclassified = self._classify is None

        async def guarded(*args: Any, **kwargs: Any) -> R:
            started = clock()
            # As in _before_call. Neither a healthy call nor a rejection while OPEN changes the state: no lock.
            if self._state is CLOSED:
                generation = self._generation
            elif self._state is OPEN and (remaining := self._opened_at + self._recovery_time - started) > 0.0:
                raise self._rejection(remaining)
            else:
                generation = await self._before_call(started)
            try:
                # An empty ** is copied all the same.
                result = await (func(*args, **kwargs) if kwargs else func(*args))
            except BaseException as error:
                # Also CancelledError and GeneratorExit: a probe that ends must never keep its place.
                await self._settle(generation, started, clock(), self.judge(None, error), error)
                raise
            now = clock()
            if unclassified and generation == self._steady and not is_logged(DEBUG):
                # No outcome to ask for, no streak to end, nothing to log: the window is all there is to keep.
                if window and (cause := window.record(now, now - started, False)):
                    await self._transition(OPEN, cause, now, latency_ms=(now - started) * 1000)
            else:
                await self._settle(generation, started, now, self.judge(result, None))
            return result

        return guarded

    # --- helpers -------------------------------------------------------------------------------------------------

    def _rejection(self, remaining: float) -> CircuitBreakerOpenException:
        """Count a rejection; log only the first of a generation: an open circuit under load must not flood the log."""
        backoff = self.calculate_backoff()
        self._retry_attempt += 1
        self._rejections += 1
        if self._rejections == 1:
            event = "call_rejected_circuit_open" if self._state is OPEN else "call_rejected_half_open_limit"
            self._log(logging.WARNING, event, backoff_seconds=backoff)
        message = (
            self._open_message if self._state is OPEN else f"circuit {self.name!r} is HALF_OPEN, its probes are taken"
        )
        return CircuitBreakerOpenException(message, self.name, remaining, backoff)

    def _own_lock(self) -> asyncio.Lock:
        """The lock, for the one event loop that this breaker serves."""
        loop = asyncio._get_running_loop()  # None, and no error, where another library than asyncio drives the call
        if loop is not self._loop:
            # asyncio's locks are not thread-safe: two loops in two threads could both hold it.
            if self._loop is not None and self._loop.is_running():
                raise RuntimeError(f"circuit breaker {self.name!r} is in use by an event loop in another thread")
            self._loop = loop
        if self._lock.locked():
            # By a section that cannot go on before this call returns: a finalizer or signal handler interrupted it.
            raise RuntimeError(f"circuit breaker {self.name!r} is changing its state at this moment")
        return self._lock

    def _notify(self) -> None:
        if self._notifying:  # A listener's own call made this transition: it is delivered when its turn comes.
            return
        self._notifying = True
        try:
            while self._undelivered:
                transition = self._undelivered.pop(0)
                for listener in self._listeners:
                    try:
                        listener(transition)
                    except (Exception, asyncio.CancelledError):  # a future that the listener asked was cancelled
                        self._log(logging.ERROR, "listener_failed", exc_info=True)
        finally:
            self._notifying = False

    def _log(self, level: int, event: str, *, exc_info: bool = False, **fields: Any) -> None:
        if is_logged(level):
            extra = {
                "latency_ms": 0.0,
                "circuit_name": self.name,
                "state": self._state.value,
                "event": event,
                "consecutive_failures": self._consecutive_failures,
                "half_open_successes": self._half_open_successes if self._state is HALF_OPEN else None,
                **fields,
            }
            logger.log(level, event, extra=extra, exc_info=exc_info)

    def __repr__(self) -> str:
        return f"<CircuitBreaker {self.name!r} {self._state} generation {self._generation}>"


@overload
def circuit_breaker(func: Callable[P, Guarded], /) -> Callable[P, Guarded]: ...


@overload
def circuit_breaker(
    *, name: str | None = None, config: CircuitBreakerConfig | None = None, classify: Classifier | None = None
) -> Callable[[Callable[P, Guarded]], Callable[P, Guarded]]: ...


def circuit_breaker(
    func: Any = None,
    /,
    *,
    name: str | None = None,
    config: CircuitBreakerConfig | None = None,
    classify: Classifier | None = None,
) -> Callable[..., Any]:
    """Guard a function by a breaker of its own, named `name` or else like the function (article, Section 4.4).

    With or without parentheses. Raises TypeError, when the function is decorated, for what is neither a coroutine
    function nor an async generator function.
    """
    if func is not None and not (callable(func) or type(func) is classmethod):
        raise TypeError(f"circuit_breaker takes a function, or keywords such as name=..., config=...; not {func!r}")

    def decorate(target: Any) -> Any:
        return CircuitBreaker(name or _name_of(target), config, classify=classify)(target)

    return decorate(func) if func is not None else decorate


def _is_a(kind: Callable[[object], bool], func: object) -> bool:
    """Whether `func`, or its class's `__call__`, is of this kind (`inspect` itself looks through partials)."""
    return kind(func) or kind(getattr(type(func), "__call__", None))  # noqa: B004


def _name_of(func: Any) -> str:
    while isinstance(func, functools.partial):
        func = func.func
    return getattr(func, "__qualname__", None) or type(func).__qualname__
