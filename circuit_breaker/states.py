"""The words of the state machine (article, Section 1)."""

from dataclasses import dataclass
from enum import Enum, StrEnum


class CircuitState(StrEnum):
    """Where the circuit is."""

    CLOSED = "CLOSED"
    OPEN = "OPEN"
    HALF_OPEN = "HALF_OPEN"


class Outcome(Enum):
    """What a finished call says about the upstream."""

    SUCCESS = "success"
    """Healthy: ends a streak of failures; a good probe."""
    FAILURE = "failure"
    """Unhealthy: counts towards the trip; a bad probe."""
    ALIVE = "alive"
    """The upstream answers, the caller is wrong (a 404): neither counts nor ends a streak; a good probe."""
    IGNORED = "ignored"
    """Says nothing about the upstream (a cancelled call): no effect; a probe gives its place back."""


@dataclass(frozen=True, slots=True)
class Transition:
    """One change of state, as a listener sees it. `generation` is the one that began with it.

    `cause` is one of failure_threshold, failure_rate, slow_call_rate, recovery_time_elapsed, probe_failed,
    probe_timed_out, probes_succeeded and reset_by_hand, or the reason that was given to `trip`.
    """

    from_state: CircuitState
    to_state: CircuitState
    generation: int
    cause: str


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The breaker at one moment, for health endpoints and tests. Times in seconds, rates from 0.0 to 1.0."""

    name: str
    state: CircuitState
    generation: int
    consecutive_failures: int
    half_open_successes: int
    probes_in_flight: int
    retry_attempt: int
    remaining_seconds: float
    """Until a probe is let through; 0.0 unless OPEN."""
    window_calls: int | None
    """Calls in the sliding window; None, as the two rates, without one."""
    failure_rate: float | None
    slow_call_rate: float | None
