"""One JSON object a line (article, Section 4.2).

The breaker logs to the logger `circuit_breaker.circuit_breaker` and configures nothing; attach this formatter to a
handler of yours. Collectors, dashboards and alerts then read fields and not sentences.
"""

import json
import logging
from datetime import UTC, datetime

from circuit_breaker.states import CircuitState

_OPTIONAL_FIELDS = (
    "consecutive_failures",
    "half_open_successes",
    "backoff_seconds",
    "error_type",
    "cause",
    "rejected_calls",
)


class JsonStructuredFormatter(logging.Formatter):
    """Formats the breaker's records, and any other record, as one line of JSON.

    Always there: `timestamp` (UTC, milliseconds), `circuit_name`, `state`, `event`, `latency_ms`. When they apply:
    `consecutive_failures`, `half_open_successes`, `backoff_seconds`, `error_type`, `cause`, `rejected_calls` (beyond
    the first, which has its own line), `exception` (a traceback).
    """

    def format(self, record: logging.LogRecord) -> str:
        """The record as one JSON object without a line break."""
        # The time of the event, not of its formatting: a queue handler may format much later.
        timestamp = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        payload: dict[str, object] = {
            "timestamp": timestamp.replace("+00:00", "Z"),
            "circuit_name": getattr(record, "circuit_name", "unknown"),
            "state": getattr(record, "state", CircuitState.CLOSED.value),
            "event": getattr(record, "event", record.getMessage()),
            "latency_ms": round(float(getattr(record, "latency_ms", 0.0)), 3),
        }
        for field in _OPTIONAL_FIELDS:
            if (value := getattr(record, field, None)) is not None:
                payload[field] = value
        if record.exc_info:
            payload["exception"] = self.formatException(record.exc_info)
        return json.dumps(payload, ensure_ascii=False, default=str)
