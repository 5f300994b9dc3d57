"""One delivery: the POST, and what its answer means.

Article: Section 4.2 (headers and body) and 4.3 (backoff).
"""

import asyncio
import random
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

import httpx

from outbox.config import AppConfig
from outbox.models import OutboxEvent

BODY_LIMIT = 2048
RETRY_AFTER_LIMIT_SECONDS = 3600.0
RETRY_AFTER_STATUSES = frozenset({429, 503})


class Delivery:
    """One attempt to deliver one event. Once a status has arrived it decides, whatever happens afterwards."""

    def __init__(self, config: AppConfig, endpoint: httpx.URL, event: OutboxEvent) -> None:
        self._config = config
        self._endpoint = endpoint
        self._event = event
        self._body = bytearray()
        self._retry_after: str | None = None
        self.status_code: int | None = None
        self.error: str | None = None

    async def send(self, client: httpx.AsyncClient) -> None:
        """POST the event, within `request_timeout` seconds in all. What goes wrong is found in `error`.

        If the process dies in here, the consumer may or may not have run its side effect: the event is sent again
        when its lease has expired, with the same key. Cancelled, it raises `CancelledError`, and `status_code` tells
        whether the answer had arrived.
        """
        # httpx's own timeouts are per read: an answer that drips a byte a second never meets one.
        deadline = asyncio.timeout(self._config.request_timeout)
        try:
            async with deadline:
                await self._post(client)
        except Exception as error:
            timed_out = isinstance(error, TimeoutError) and deadline.expired()
            self.error = f"no answer within {self._config.request_timeout} s" if timed_out else _describe(error)
        except (asyncio.CancelledError, BaseExceptionGroup) as error:
            if _being_cancelled():
                raise asyncio.CancelledError from error
            self.error = _describe(error)  # raised by the client, not by whoever cancels this task

    async def _post(self, client: httpx.AsyncClient) -> None:
        async with client.stream(
            "POST",
            self._endpoint,
            content=self._event.payload_json.encode(),
            headers={
                "Content-Type": "application/json",
                "Idempotency-Key": self._event.idempotency_key,
                "X-Event-Id": self._event.id,
                "X-Event-Type": self._event.event_type,
                "Accept-Encoding": "identity",
            },
            follow_redirects=False,  # else a consumer could send the event on to anybody
            timeout=None,
        ) as response:
            self.status_code = response.status_code
            self._retry_after = response.headers.get("Retry-After")
            # Raw and only the beginning: a small gzip can unpack to gigabytes, and a body need not end.
            async for chunk in response.aiter_raw():
                self._body += chunk[: BODY_LIMIT - len(self._body)]
                if len(self._body) >= BODY_LIMIT:
                    break

    # --- what it means ---

    @property
    def succeeded(self) -> bool:
        return self.status_code is not None and 200 <= self.status_code < 300

    @property
    def failed_for_good(self) -> bool:
        """The same bytes cannot succeed later."""
        return self.status_code in self._config.permanent_failure_statuses

    @property
    def reason(self) -> str:
        """For `last_error` and `failure_reason`: the status and the first bytes of the body, or the error."""
        if self.status_code is None:
            return self.error or self._reason_not_to_send()
        body = self._body.decode("utf-8", "replace").strip()
        return f"HTTP {self.status_code}: {body}" if body else f"HTTP {self.status_code}"

    def _reason_not_to_send(self) -> str:
        reason = (
            f"not sent again: its {self._event.retry_count} attempts are used up, counting those whose lease expired"
        )
        return f"{reason} (before: {self._event.last_error})" if self._event.last_error else reason

    def retry_in(self) -> float | None:
        """Return after how many seconds to try again, or None: never (Section 4.3).

        The backoff doubles from `base_backoff` up to `max_backoff`. A Retry-After of 429 and 503 can only make it
        longer, and by no more than an hour.
        """
        if self.failed_for_good:
            return None
        backoff = calculate_backoff(self._config, self._event.retry_count)
        if self.status_code in RETRY_AFTER_STATUSES and self._retry_after is not None:
            return max(backoff, _retry_after_seconds(self._retry_after))
        return backoff


def calculate_backoff(config: AppConfig, failures_before: int) -> float:
    """Return `base_backoff * 2**failures_before` seconds, at most `max_backoff`; a random part with `full_jitter`."""
    try:
        backoff = min(config.max_backoff, config.base_backoff * 2.0**failures_before)
    except OverflowError:  # 2.0 ** 1024
        backoff = config.max_backoff
    return random.uniform(0.0, backoff) if config.full_jitter else backoff  # noqa: S311 - no secret


def _retry_after_seconds(value: str) -> float:
    """Return the seconds of a Retry-After header, which has a number or a date; 0 for anything else."""
    try:
        if value.isascii() and value.isdigit():
            seconds = float(value)
        else:
            moment = parsedate_to_datetime(value)
            seconds = (moment.replace(tzinfo=moment.tzinfo or UTC) - datetime.now(UTC)).total_seconds()
    except (ValueError, OverflowError):
        return 0.0
    return min(max(seconds, 0.0), RETRY_AFTER_LIMIT_SECONDS)


def _being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _describe(error: BaseException) -> str:
    # httpx often says nothing itself: that the peer has reset the connection is told further down.
    told: BaseException | None = error
    while told is not None and not str(told):
        told = told.__cause__ or told.__context__
    return type(error).__name__ if told is None else f"{type(error).__name__}: {told}"
