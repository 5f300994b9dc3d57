"""Settings and logs: the frozen `AppConfig` and one JSON object per log line.

Article: Section 3 (layout) and Section 6 (telemetry).
"""

import json
import logging
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal, TextIO

import httpx
from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=2**63 - 1)]  # what SQLite can hold
FailureStatus = Annotated[int, Field(ge=300, le=599)]


class AppConfig(BaseModel):
    """Settings of one outbox, checked once and then unchangeable (Section 3). All times are in seconds.

    Raises `pydantic.ValidationError`, which names the field, for a bad value, an unknown field, an endpoint that is
    not http(s), and a pair that is unsafe together (`max_backoff` below `base_backoff`, `lease_seconds` not above
    `request_timeout`).
    """

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    consumer_endpoint: str = Field(description="where events are posted, an http(s) URL")
    db_path: Path = Field(default=Path("outbox.db"), description="the SQLite file")
    synchronous: Literal["NORMAL", "FULL"] = Field(
        default="NORMAL",
        description="FULL: a commit survives a power cut too, at the price of a disk flush each",
    )

    batch_size: Count = Field(default=10, description="events claimed at a time, at most")
    max_in_flight: Count = Field(default=10, description="deliveries under way at a time, at most")
    poll_interval: Seconds = Field(default=0.5, description="how often to look for events of other processes")

    request_timeout: Seconds = Field(default=10.0, description="the deadline of one whole delivery")
    lease_seconds: Seconds = Field(default=30.0, description="after this a claim that was not settled is void")

    max_delivery_attempts: Count = Field(default=3, description="failed attempts until an event is quarantined")
    base_backoff: Seconds = Field(default=0.5, description="wait after the first failure; doubles with each further")
    max_backoff: Seconds = Field(default=60.0, description="the longest wait between two attempts")
    full_jitter: bool = Field(default=False, description="draw each wait at random between 0 and the backoff")
    permanent_failure_statuses: frozenset[FailureStatus] = Field(
        default=frozenset({400, 410, 413, 422}), description="answers that quarantine at once"
    )

    @field_validator("consumer_endpoint")
    @classmethod
    def _is_http(cls, endpoint: str) -> str:
        try:
            url = httpx.URL(endpoint)
        except httpx.InvalidURL as error:
            raise ValueError(f"is not a URL: {error}") from None
        if url.scheme not in {"http", "https"} or not url.host:
            raise ValueError("must be an http:// or https:// URL with a host")
        if url.port is not None and not 0 < url.port < 65536:
            raise ValueError(f"has the port {url.port}, which is not one of 1 to 65535")
        return endpoint

    @field_validator("lease_seconds")
    @classmethod
    def _outlives_the_request(cls, lease_seconds: float, info: ValidationInfo) -> float:
        # Else a second dispatcher takes over, and sends again, while the first still waits for the answer.
        if lease_seconds <= info.data.get("request_timeout", 0.0):
            raise ValueError("must be greater than request_timeout")
        return lease_seconds

    @field_validator("max_backoff")
    @classmethod
    def _is_not_below_the_base(cls, max_backoff: float, info: ValidationInfo) -> float:
        if max_backoff < info.data.get("base_backoff", 0.0):
            raise ValueError("must not be less than base_backoff")
        return max_backoff


_STANDARD_ATTRIBUTES = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


class JsonLogFormatter(logging.Formatter):
    """One log record, one line of JSON: timestamp, level, logger, message, then what `extra` held (Section 6).

    The line is ASCII, so that no stream refuses it. A value that JSON does not have is written as its `str` or `repr`.
    """

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "timestamp": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: value for name, value in record.__dict__.items() if name not in _STANDARD_ATTRIBUTES | set(line)}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return "{" + ", ".join(f"{_json_text(name)}: {_json_text(value)}" for name, value in line.items()) + "}"


def _json_text(value: object) -> str:
    try:
        return json.dumps(value, allow_nan=False, default=str)
    except Exception:  # NaN, a list that contains itself, a key that is no string, an object that has no text
        try:
            return json.dumps(repr(value))
        except Exception:
            return json.dumps(f"<{type(value).__name__}>")


def configure_logging(level: int | str = logging.INFO, stream: TextIO | None = None) -> None:
    """Write what `outbox` logs to `stream` (default: standard error) as JSON; a second call replaces the first."""
    logger = logging.getLogger("outbox")
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLogFormatter())
    logger.handlers = [handler]
    logger.setLevel(level)
    logger.propagate = False
