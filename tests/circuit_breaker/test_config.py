"""Settings are checked when they are made, and the error names the field (article, Section 4.1)."""

from typing import Any

import pytest
from pydantic import ValidationError

from circuit_breaker import CircuitBreakerConfig, CountWindow, TimeWindow


def test_the_articles_five_fields_and_defaults() -> None:
    config = CircuitBreakerConfig()
    assert (config.failure_threshold, config.recovery_time_seconds, config.half_open_max_calls) == (3, 10.0, 2)
    assert (config.base_backoff, config.max_backoff) == (0.5, 5.0)
    assert (config.expected_exceptions, config.half_open_timeout_seconds, config.window) == ((Exception,), None, None)


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"failure_threshold": 0}, "failure_threshold"),
        ({"failure_threshold": 1.5}, "failure_threshold"),
        ({"recovery_time_seconds": 0.0}, "recovery_time_seconds"),
        ({"recovery_time_seconds": float("nan")}, "recovery_time_seconds"),
        ({"recovery_time_seconds": float("inf")}, "recovery_time_seconds"),
        ({"half_open_max_calls": 0}, "half_open_max_calls"),
        ({"base_backoff": 0.0}, "base_backoff"),
        ({"base_backoff": 2.0, "max_backoff": 1.0}, "max_backoff"),
        ({"base_backoff": 6.0}, "max_backoff"),  # also when the default is what does not fit
        ({"max_backoff": 0.1}, "max_backoff"),
        ({"max_backoff": float("inf")}, "max_backoff"),
        ({"half_open_timeout_seconds": 0.0}, "half_open_timeout_seconds"),
        ({"half_open_timeout_seconds": float("nan")}, "half_open_timeout_seconds"),
        ({"expected_exceptions": ("ValueError",)}, "expected_exceptions"),
        ({"expected_exceptions": (BaseException,)}, "expected_exceptions"),
        ({"expected_exceptions": (int,)}, "expected_exceptions"),
        ({"failure_treshold": 3}, "failure_treshold"),
        ({"window": 50}, "window"),
    ],
)
def test_a_bad_value_is_refused_and_the_field_is_named(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(ValidationError) as refused:
        CircuitBreakerConfig(**settings)
    assert {error["loc"][0] for error in refused.value.errors()} == {field}


def test_a_config_cannot_be_changed() -> None:
    config = CircuitBreakerConfig()
    with pytest.raises(ValidationError, match="frozen"):
        config.failure_threshold = 5  # type: ignore[misc]


def test_windows_can_come_from_plain_data() -> None:
    from_data = CircuitBreakerConfig.model_validate({"window": {"size": 20}})
    assert from_data.window == CountWindow(size=20)
    assert CircuitBreakerConfig.model_validate({"window": {"seconds": 5}}).window == TimeWindow(seconds=5.0)
