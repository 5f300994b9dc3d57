"""Settings, checked once and then frozen (article, Section 4.1)."""

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from circuit_breaker.sliding_window import CountWindow, TimeWindow

__all__ = ["CircuitBreakerConfig", "CountWindow", "TimeWindow"]


class CircuitBreakerConfig(BaseModel):
    """How one breaker behaves. Times in seconds. Raises `pydantic.ValidationError` naming the field."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True)

    failure_threshold: int = Field(default=3, ge=1)
    """This many failures in a row trip the circuit; not looked at when there is a `window`."""
    recovery_time_seconds: float = Field(default=10.0, gt=0.0)
    """OPEN lasts this long; the first call after it probes."""
    half_open_max_calls: int = Field(default=2, ge=1)
    """Probes admitted in one HALF_OPEN round in total. All must succeed to close."""
    base_backoff: float = Field(default=0.5, gt=0.0)
    max_backoff: float = Field(default=5.0, gt=0.0)
    expected_exceptions: tuple[type[Exception], ...] = (Exception,)
    """Exceptions that may say something about the upstream. All others are ignored."""
    half_open_timeout_seconds: float | None = Field(default=None, gt=0.0)
    """A probe that takes this long counts as failed (None: `recovery_time_seconds`)."""
    window: CountWindow | TimeWindow | None = None
    """Trip on a failure rate and not on a streak (article, Section 7)."""

    @field_validator("max_backoff")
    @classmethod
    def _not_below_base(cls, max_backoff: float, info: ValidationInfo) -> float:
        base_backoff = info.data.get("base_backoff", max_backoff)
        if max_backoff < base_backoff:
            raise ValueError(f"max_backoff ({max_backoff}) must not be below base_backoff ({base_backoff})")
        return max_backoff
