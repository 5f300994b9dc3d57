"""Failure rate over the last calls, or the last seconds (article, Section 7).

A streak counter is blind to a brownout: an upstream that fails three calls of four but answers every fourth never
builds up a streak. A window sees the rate. Both windows cost O(1) a call: they keep running totals and subtract what
leaves, and never add the whole window up again.
"""

from abc import ABC, abstractmethod

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

BUCKETS = 10


class _WindowConfig(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    failure_rate: float = Field(default=0.5, ge=0.0, le=1.0)
    slow_call_seconds: float | None = Field(default=None, gt=0.0)
    slow_call_rate: float = Field(default=1.0, ge=0.0, le=1.0)


class CountWindow(_WindowConfig):
    """Trips when, of the last `size` calls, a share above `failure_rate` failed or above `slow_call_rate` was slow.

    Nothing is judged before `minimum_calls` (None: `size`). A call is slow from `slow_call_seconds` on (None: never).
    """

    size: int = Field(default=50, ge=1)
    minimum_calls: int | None = Field(default=None, ge=1)

    @field_validator("minimum_calls")
    @classmethod
    def _fits_the_window(cls, minimum_calls: int | None, info: ValidationInfo) -> int | None:
        size = info.data.get("size")
        if minimum_calls and size and minimum_calls > size:
            raise ValueError(f"minimum_calls ({minimum_calls}) must not exceed size ({size}): it would never trip")
        return minimum_calls

    def start(self) -> "SlidingWindow":
        """An empty window of this kind."""
        return _LastCalls(self)


class TimeWindow(_WindowConfig):
    """As `CountWindow`, over the calls of the last `seconds`, counted in ten buckets: a call leaves the window after
    nine to ten tenths of `seconds`, with or without traffic.
    """

    seconds: float = Field(default=60.0, gt=0.0)
    minimum_calls: int = Field(default=10, ge=1)

    def start(self) -> "SlidingWindow":
        """An empty window of this kind."""
        return _LastSeconds(self)


class SlidingWindow(ABC):
    """Running totals over the calls in the window, and the verdict on them."""

    __slots__ = ("_failure_rate", "_minimum_calls", "_slow_call_rate", "_slow_call_seconds", "calls", "failed", "slow")

    def __init__(self, config: CountWindow | TimeWindow, minimum_calls: int) -> None:
        self.calls = self.failed = self.slow = 0
        self._minimum_calls = minimum_calls
        self._failure_rate = config.failure_rate
        self._slow_call_rate = config.slow_call_rate
        self._slow_call_seconds = float("inf") if config.slow_call_seconds is None else config.slow_call_seconds

    @abstractmethod
    def record(self, now: float, seconds: float, failed: bool) -> str | None:
        """Count a call that ended at `now` after `seconds`. Returns what now calls for a trip, or None."""

    @abstractmethod
    def expire(self, now: float) -> None:
        """Drop what is too old at `now`."""

    @abstractmethod
    def clear(self) -> None:
        """Forget every call."""

    def _verdict(self) -> str | None:
        # Quotients, not products: 29 / 100 > 0.29 is false, as it should be, but 29 > 0.29 * 100 is true.
        if self.calls < self._minimum_calls:
            return None
        if self.failed / self.calls > self._failure_rate:
            return "failure_rate"
        if self.slow / self.calls > self._slow_call_rate:
            return "slow_call_rate"
        return None


class _LastCalls(SlidingWindow):
    """A ring with one byte a call: bit 0 it failed, bit 1 it was slow."""

    __slots__ = ("_next", "_ring", "_size")

    def __init__(self, config: CountWindow) -> None:
        super().__init__(config, config.minimum_calls or config.size)
        self._size = config.size
        self._next = 0
        self._ring = bytearray(config.size)

    def record(self, now: float, seconds: float, failed: bool) -> str | None:
        call = 1 if failed else 0
        if seconds >= self._slow_call_seconds:
            call += 2
        index = self._next
        oldest = self._ring[index]
        if call != oldest:
            self._ring[index] = call
            self.failed += (call & 1) - (oldest & 1)
            self.slow += (call >> 1) - (oldest >> 1)
        index += 1
        if index > self.calls:
            self.calls = index
        self._next = index if index < self._size else 0
        return self._verdict() if self.failed or self.slow else None

    def expire(self, now: float) -> None:
        pass  # calls leave by being overwritten

    def clear(self) -> None:
        self._ring = bytearray(self._size)
        self._next = self.calls = self.failed = self.slow = 0


class _LastSeconds(SlidingWindow):
    """Ten buckets of [calls, failed, slow]; the bucket of an instant is its whole number of tenths, modulo ten."""

    __slots__ = ("_buckets", "_newest", "_width")

    def __init__(self, config: TimeWindow) -> None:
        super().__init__(config, config.minimum_calls)
        self._width = config.seconds / BUCKETS
        self._newest = 0
        self.clear()

    def record(self, now: float, seconds: float, failed: bool) -> str | None:
        self.expire(now)
        slow = seconds >= self._slow_call_seconds
        bucket = self._buckets[self._newest % BUCKETS]
        bucket[0] += 1
        bucket[1] += failed
        bucket[2] += slow
        self.calls += 1
        self.failed += failed
        self.slow += slow
        return self._verdict()

    def expire(self, now: float) -> None:
        current = int(now / self._width)
        for tenth in range(max(self._newest, current - BUCKETS) + 1, current + 1):
            calls, failed, slow = self._buckets[tenth % BUCKETS]
            self._buckets[tenth % BUCKETS] = [0, 0, 0]
            self.calls -= calls
            self.failed -= failed
            self.slow -= slow
        self._newest = max(self._newest, current)

    def clear(self) -> None:
        self._buckets = [[0, 0, 0] for _ in range(BUCKETS)]
        self.calls = self.failed = self.slow = 0
