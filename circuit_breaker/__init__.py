"""An async circuit breaker with full-jitter backoff and JSON telemetry.

`circuit_breaker` is the decorator, here and in the module of the same name; the module itself is reached with
`from circuit_breaker.circuit_breaker import ...`.
"""

from circuit_breaker.circuit_breaker import CircuitBreaker, circuit_breaker
from circuit_breaker.config import CircuitBreakerConfig
from circuit_breaker.exceptions import CircuitBreakerError, CircuitBreakerOpenException
from circuit_breaker.sliding_window import CountWindow, TimeWindow
from circuit_breaker.states import CircuitState, Outcome, Snapshot, Transition
from circuit_breaker.telemetry import JsonStructuredFormatter

__all__ = [
    "CircuitBreaker",
    "CircuitBreakerConfig",
    "CircuitBreakerError",
    "CircuitBreakerOpenException",
    "CircuitState",
    "CountWindow",
    "JsonStructuredFormatter",
    "Outcome",
    "Snapshot",
    "TimeWindow",
    "Transition",
    "circuit_breaker",
]
