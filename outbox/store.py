"""What the dispatcher and the operator need of a database: the protocol that every store keeps.

`outbox.database.SQLiteStore` is one. Writing a business row together with its event is not part of it: the connection
that carries both is each database's own.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

from outbox.models import DeadLetterRecord, EventStatus, OutboxEvent, OutboxStats

FailureResult = tuple[EventStatus, int, DeadLetterRecord | None]
"""(status now, retry_count now, the dead letter if it was quarantined)"""


class OutboxStore(Protocol):
    """Claim, settle, wait, and look after. A store operation stands as a whole or never began, also when cancelled.

    A claimed event carries a lease token. Settling it (publish, failure, release) with a token that is no longer the
    row's changes nothing. Once called, a settlement is carried out although its caller is cancelled.
    """

    async def claim_batch(self, limit: int, lease_seconds: float) -> Sequence[OutboxEvent]:
        """PENDING -> PROCESSING: lease up to `limit` events that are due, oldest first, one per aggregate.

        An event whose lease expired is claimed again, and that counts as an attempt. Cancelled, it gives back what
        it had claimed.
        """
        ...

    async def mark_event_published(self, event: OutboxEvent) -> bool:
        """PROCESSING -> PUBLISHED. False: the lease was lost, nothing changed."""
        ...

    async def record_event_failure_or_quarantine(
        self, event: OutboxEvent, error_message: str, max_delivery_attempts: int, retry_in: float | None
    ) -> FailureResult | None:
        """PROCESSING -> PENDING, due in `retry_in` seconds; or -> DEAD_LETTER when that was the last attempt, or
        `retry_in` is None. None: the lease was lost, nothing changed."""
        ...

    async def release(self, event: OutboxEvent, retry_in: float) -> bool:
        """PROCESSING -> PENDING, due in `retry_in` seconds, no attempt counted. False: the lease was lost."""
        ...

    async def wait_for_events(self, timeout: float) -> None:
        """Return when this process committed something that may be due, or after `timeout` seconds."""
        ...

    async def replay_dead_letter(self, original_event_id: str) -> bool:
        """DEAD_LETTER -> PENDING with `retry_count` 0 and the same key. False: no such dead letter."""
        ...

    async def list_dead_letters(self, limit: int = 100, after: str | None = None) -> Sequence[DeadLetterRecord]:
        """Return up to `limit` dead letters, oldest first, that came after the one with the id `after`."""
        ...

    async def stats(self) -> OutboxStats:
        """Count the events per state and tell the age of the oldest PENDING one."""
        ...

    async def purge_published(self, older_than: timedelta) -> int:
        """Delete what was published longer ago than that; return how many. Their idempotency keys are forgotten."""
        ...
