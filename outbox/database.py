"""The outbox on SQLite: a business row and its event in one transaction, then claim, settle, quarantine, replay.

Article: Section 3 (WAL), Section 4.1 (atomic persistence) and 4.3 (backoff and quarantine). Every write names the state
that it expects; whatever raises, including a cancellation, leaves all of an operation or nothing.
"""

import logging
import math
import sqlite3
from asyncio import Event
from asyncio import timeout as deadline
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeVar
from uuid import uuid4

import aiosqlite
from pydantic import ValidationError

from outbox.connection import DatabaseThread, Operation, Statement, configure_connection
from outbox.models import (
    DeadLetterRecord,
    DuplicateEventError,
    EventStatus,
    OrderCreate,
    OrderRecord,
    OutboxEvent,
    OutboxStats,
    Payload,
    new_id,
    seal_envelope,
    timestamp,
)
from outbox.schema import create_schema
from outbox.store import FailureResult

__all__ = ["SQLiteStore", "configure_connection"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

ERROR_MESSAGE_LIMIT = 4096
LONGEST_WAIT_SECONDS = 10 * 365 * 86_400.0  # a date far beyond has no text of the fixed width
PURGE_BATCH = 1000

_EVENT_COLUMNS = ", ".join(OutboxEvent.model_fields)
_DEAD_LETTER_COLUMNS = ", ".join(DeadLetterRecord.model_fields)

_INSERT_ORDER = """
    INSERT INTO orders (id, customer_email, amount, status, created_at)
    VALUES (:id, :customer_email, :amount, :status, :created_at)
"""
_INSERT_EVENT = f"""
    INSERT INTO outbox (id, event_type, aggregate_id, payload_json, idempotency_key, status, retry_count,
                        is_head, next_attempt_at, created_at, updated_at)
    VALUES (:id, :event_type, :aggregate_id, :payload_json, :idempotency_key, 'PENDING', 0,
            NOT EXISTS (SELECT 1 FROM outbox WHERE aggregate_id = :aggregate_id AND is_head = 1), :now, :now, :now)
    RETURNING {_EVENT_COLUMNS}
"""

# Expired leases first, then the heads that are due, oldest first. Each half reads one partial index up to the limit.
_CLAIM = f"""
    UPDATE outbox SET status = 'PROCESSING', retry_count = retry_count + (status = 'PROCESSING'),
                      lease_token = :token, lease_expires_at = :expires, updated_at = :now
    WHERE sequence IN (
        SELECT sequence FROM (
            SELECT sequence FROM outbox
            WHERE status = 'PROCESSING' AND (lease_expires_at <= :now OR lease_expires_at IS NULL)
            ORDER BY lease_expires_at LIMIT :limit
        )
        UNION ALL
        SELECT sequence FROM (
            SELECT sequence FROM outbox
            WHERE status = 'PENDING' AND is_head = 1 AND next_attempt_at <= :now
            ORDER BY next_attempt_at, sequence LIMIT :limit
        )
        LIMIT :limit
    )
    RETURNING {_EVENT_COLUMNS}
"""

# Every settlement names the state and the lease that it expects: where the row has moved on, it changes nothing.
_IF_HELD = "WHERE sequence = :sequence AND status = 'PROCESSING' AND lease_token = :token RETURNING sequence"
_SETTLED = "lease_token = NULL, lease_expires_at = NULL, updated_at = :now"
_PUBLISH = f"UPDATE outbox SET status = 'PUBLISHED', {_SETTLED} {_IF_HELD}"
_RELEASE = f"UPDATE outbox SET status = 'PENDING', next_attempt_at = :due, {_SETTLED} {_IF_HELD}"
_RETRY = f"""
    UPDATE outbox SET status = 'PENDING', next_attempt_at = :due,
                      retry_count = :retry_count, last_error = :error, {_SETTLED}
    {_IF_HELD}
"""
_QUARANTINE = f"""
    UPDATE outbox SET status = 'DEAD_LETTER',
                      retry_count = coalesce(:retry_count, retry_count), last_error = :error, {_SETTLED}
    {_IF_HELD}
"""
# The payload goes from table to table as it is: a row that cannot be decoded can still be quarantined.
_INSERT_DEAD_LETTER = f"""
    INSERT INTO dead_letter_queue (id, original_event_id, payload_json, failure_reason, quarantined_at)
    SELECT :dlq_id, id, payload_json, :error, :now FROM outbox WHERE sequence = :sequence
    RETURNING {_DEAD_LETTER_COLUMNS}
"""
_GIVE_BACK_CLAIM = (
    f"UPDATE outbox SET status = 'PENDING', {_SETTLED} WHERE status = 'PROCESSING' AND lease_token = :token"
)

_REPLAY = """
    UPDATE outbox SET status = 'PENDING', retry_count = 0, next_attempt_at = :now, updated_at = :now
    WHERE id = :id AND status = 'DEAD_LETTER'
"""
_LIST_DEAD_LETTERS = f"SELECT {_DEAD_LETTER_COLUMNS} FROM dead_letter_queue WHERE rowid > ? ORDER BY rowid LIMIT ?"
_FIND_DEAD_LETTER = "SELECT rowid FROM dead_letter_queue WHERE id = :id OR original_event_id = :id"
_COUNTS = {
    EventStatus.PENDING: "SELECT count(*) FROM outbox WHERE status = 'PENDING'",
    EventStatus.PROCESSING: "SELECT count(*) FROM outbox WHERE status = 'PROCESSING'",
    EventStatus.PUBLISHED: "SELECT count(*) FROM outbox WHERE status = 'PUBLISHED'",
    EventStatus.DEAD_LETTER: "SELECT count(*) FROM dead_letter_queue",
}
_PENDING_SINCE = "SELECT created_at FROM outbox WHERE status = 'PENDING' ORDER BY sequence"
_PURGE = """
    DELETE FROM outbox WHERE sequence IN (
        SELECT sequence FROM outbox WHERE status = 'PUBLISHED' AND updated_at < :before LIMIT :limit
    )
    RETURNING sequence
"""


def _utc_now() -> datetime:
    return datetime.now(UTC)


class SQLiteStore:
    """The outbox in one SQLite file: `async with SQLiteStore(path) as store:` (Section 4.1, 4.3).

    One store serves many coroutines of one event loop, and many processes share the file. `synchronous` is SQLite's:
    with "NORMAL" a commit survives the death of the process, with "FULL" a power cut too. `clock` returns the current
    time, aware, in UTC.

    Opening raises `sqlite3.Error` with the name of the file: it is a folder, unreadable, no SQLite database, or was
    locked for longer than the busy timeout (5 seconds). The methods raise `sqlite3.Error` when the database fails, and
    have then changed nothing; what they promise beyond that is told at `outbox.store.OutboxStore`.
    """

    def __init__(
        self,
        db_path: str | Path,
        *,
        synchronous: Literal["NORMAL", "FULL"] = "NORMAL",
        clock: Callable[[], datetime] = _utc_now,
    ) -> None:
        if str(db_path) in {"", ":memory:"}:
            raise ValueError("db_path must name a file: a database in memory is lost with the process")
        if synchronous not in {"NORMAL", "FULL"}:
            raise ValueError(f"synchronous must be NORMAL or FULL, not {synchronous!r}")
        self._database = DatabaseThread(Path(db_path), synchronous)
        self._clock = clock
        self._may_be_due = Event()

    async def __aenter__(self) -> Self:
        await self._database.open(create_schema)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._database.close()

    # --- Section 4.1: the business row and its event, in one transaction ---

    async def create_order_with_outbox_event(
        self, order_create: OrderCreate, failure_injector: Callable[[], object] | None = None
    ) -> tuple[OrderRecord, OutboxEvent]:
        """Insert the order and its `order.created` event, both or neither (Section 4.1).

        `failure_injector`, for tests, is called in the database thread between the two inserts; what it raises undoes
        the first and is raised here.
        """
        now = self._clock()
        order = OrderRecord(id=new_id(now), status="CREATED", created_at=now, **dict(order_create))
        amount = format(order.amount, "f")
        data = {"id": order.id, "customer_email": order.customer_email, "amount": amount, "status": order.status}
        event_row = _event_row(now, "order.created", order.id, data)
        order_row = {**data, "created_at": event_row["now"]}

        def insert_both(connection: sqlite3.Connection) -> OutboxEvent:
            connection.execute(_INSERT_ORDER, order_row)
            if failure_injector is not None:
                failure_injector()
            with _duplicate_key_as_such(event_row):
                return _event(connection.execute(_INSERT_EVENT, event_row).fetchall()[0])

        event = await self._write(insert_both)
        logger.info(
            "Atomic transaction committed: order and outbox event are stored.",
            extra={"order_id": order.id, "event_id": event.id, "idempotency_key": event.idempotency_key},
        )
        return order, event

    @asynccontextmanager
    async def transaction(self) -> AsyncGenerator[aiosqlite.Connection, None]:
        """Give the block a connection inside a transaction: the caller's own tables, and the event by `add_event`.

        The block's end commits; an exception of any kind, also a cancellation, rolls back. Transactions take turns
        with all other operations of the store. Calling one of those inside the block raises `RuntimeError`, since it
        would wait for the block to end. The connection is the block's: do not use it afterwards.
        """
        try:
            async with self._database.transaction() as conn:
                yield conn
        finally:
            self._may_be_due.set()

    async def add_event(
        self,
        conn: aiosqlite.Connection,
        *,
        event_type: str,
        aggregate_id: str,
        payload: Payload,
        occurrence_id: str | None = None,
    ) -> OutboxEvent:
        """Insert an event in the transaction that is open on `conn`.

        Events of one `aggregate_id` are delivered in commit order. The key is made of type, aggregate and payload, so
        the same thing happening twice needs an `occurrence_id` to tell the two apart.

        Raises `DuplicateEventError` for a key that is in the outbox already (the transaction goes on without this
        event), `ValueError` or `TypeError` for what JSON or a header cannot carry, `RuntimeError` outside of a
        transaction.
        """
        if not conn.in_transaction:
            raise RuntimeError("add_event needs an open transaction: alone, the event would commit without its cause")
        row = _event_row(self._clock(), event_type, aggregate_id, payload, occurrence_id)
        with _duplicate_key_as_such(row):
            return _event(next(iter(await conn.execute_fetchall(_INSERT_EVENT, row))))

    # --- Section 4.2: claim ---

    async def claim_batch(self, limit: int, lease_seconds: float) -> list[OutboxEvent]:
        """PENDING -> PROCESSING: lease up to `limit` due events for `lease_seconds` (Section 4.2).

        If the process dies from here on, the lease expires and another claim takes the event over; that counts as an
        attempt, so an event that kills its dispatcher ends in quarantine and not in a loop. A row that cannot be
        decoded is quarantined at once, and the others are returned.
        """
        _refuse_negative(limit)
        now = self._clock()
        claim = {
            "token": uuid4().hex,
            "now": timestamp(now),
            "expires": _moment_after(now, lease_seconds),
            "limit": limit,
        }

        claimed: list[sqlite3.Row] = []

        def take_leases(connection: sqlite3.Connection) -> None:
            claimed[:] = connection.execute(_CLAIM, claim).fetchall()

        events: list[OutboxEvent] = []
        try:
            await self._database.run(take_leases)
            for row in claimed:
                try:
                    events.append(_event(row))
                except ValidationError as error:
                    await self._quarantine_undecodable(row["sequence"], claim, str(error))
        except BaseException:
            # The claim may have been committed, and nobody has it: without this its events wait for the lease's end.
            if claimed:
                with suppress(sqlite3.Error, RuntimeError):  # the database fails, or the store was closed meanwhile
                    await self._database.run_uncancelled(Statement(_GIVE_BACK_CLAIM, claim))
            raise
        return sorted(events, key=lambda event: event.sequence)

    async def _quarantine_undecodable(self, sequence: int, claim: dict[str, Any], reason: str) -> None:
        failure = claim | {"sequence": sequence, "retry_count": None, "error": _storable(reason)}
        dead_letter = await self._settle(partial(_quarantine, failure))
        if dead_letter is not None:
            logger.error(
                "Event cannot be decoded and was quarantined in the dead-letter queue (DLQ).",
                extra={"event_id": dead_letter.original_event_id, "dlq_id": dead_letter.id, "error": reason},
            )

    # --- Section 4.3: settle ---

    async def mark_event_published(self, event: OutboxEvent) -> bool:
        """PROCESSING -> PUBLISHED. False: the lease was lost, nothing changed.

        If the process dies before this commits, the event is delivered again, with the same key.
        """
        return bool(await self._settle(Statement(_PUBLISH, _held(event, self._clock()))))

    async def release(self, event: OutboxEvent, retry_in: float) -> bool:
        """PROCESSING -> PENDING, due in `retry_in` seconds, no attempt counted. False: the lease was lost."""
        now = self._clock()
        return bool(await self._settle(Statement(_RELEASE, _held(event, now) | {"due": _moment_after(now, retry_in)})))

    async def record_event_failure_or_quarantine(
        self, event: OutboxEvent, error_message: str, max_delivery_attempts: int, retry_in: float | None
    ) -> FailureResult | None:
        """Count the attempt; PENDING and due in `retry_in` seconds, or DEAD_LETTER (Section 4.3).

        Quarantined is what has used up `max_delivery_attempts`, and at once where `retry_in` is None. The status and
        the row in `dead_letter_queue` are one transaction. Returns (status, retry_count, dead letter or None), or
        None: the lease was lost, nothing changed.
        """
        # An event that was claimed with its attempts used up was not sent again: there is nothing to count.
        retry_count = max(event.retry_count, min(event.retry_count + 1, max_delivery_attempts))
        now = self._clock()
        failure = _held(event, now) | {"retry_count": retry_count, "error": _storable(error_message)}

        if retry_in is None or retry_count >= max_delivery_attempts:
            dead_letter = await self._settle(partial(_quarantine, failure))
            return None if dead_letter is None else (EventStatus.DEAD_LETTER, retry_count, dead_letter)
        retried = await self._settle(Statement(_RETRY, failure | {"due": _moment_after(now, retry_in)}))
        return (EventStatus.PENDING, retry_count, None) if retried else None

    # --- waiting, and what an operator does ---

    async def wait_for_events(self, timeout: float) -> None:
        """Return when this store committed something that may be due, or after `timeout` seconds."""
        with suppress(TimeoutError):
            async with deadline(timeout):
                await self._may_be_due.wait()
        self._may_be_due.clear()

    async def replay_dead_letter(self, original_event_id: str) -> bool:
        """DEAD_LETTER -> PENDING with `retry_count` 0 and the same key, the dead letter deleted (Section 7).

        The event joins the line of its aggregate. False: there is no such dead letter; replaying twice is harmless.
        """
        replay = {"id": original_event_id, "now": timestamp(self._clock())}

        def revive(connection: sqlite3.Connection) -> bool:
            connection.execute("DELETE FROM dead_letter_queue WHERE original_event_id = :id", replay)
            return connection.execute(_REPLAY, replay).rowcount == 1

        return await self._write(revive)

    async def list_dead_letters(self, limit: int = 100, after: str | None = None) -> list[DeadLetterRecord]:
        """Return up to `limit` dead letters, oldest first; the next page is that `after` the last one's id.

        Raises `ValueError` when `after` is no dead letter (any more).
        """
        _refuse_negative(limit)

        def page(connection: sqlite3.Connection) -> list[DeadLetterRecord]:
            start = 0
            if after is not None:
                found = connection.execute(_FIND_DEAD_LETTER, {"id": after}).fetchone()
                if found is None:
                    raise ValueError(f"after: there is no dead letter with the id {after!r}")
                start = found[0]
            rows = connection.execute(_LIST_DEAD_LETTERS, (start, limit)).fetchall()
            return [_dead_letter(row) for row in rows]

        return await self._database.run(page, writes=False)

    async def stats(self) -> OutboxStats:
        """Count the events per state and tell how many seconds the oldest PENDING one has waited."""

        now = self._clock()

        def count(connection: sqlite3.Connection) -> OutboxStats:
            counts = {status: connection.execute(sql).fetchone()[0] for status, sql in _COUNTS.items()}
            age = None
            for (created_at,) in connection.execute(_PENDING_SINCE):
                with suppress(TypeError, ValueError):  # what cannot be decoded is left to the next claim
                    age = max(0.0, (now - datetime.fromisoformat(created_at)).total_seconds())
                    break
            return OutboxStats(counts=counts, oldest_pending_age_seconds=age)

        return await self._database.run(count, writes=False)

    async def purge_published(self, older_than: timedelta) -> int:
        """Delete what was published longer ago than `older_than`; return how many. Their keys are forgotten.

        It goes in small batches, so that deliveries go on between them. Raises `ValueError` for a negative time.
        """
        if older_than < timedelta(0):
            raise ValueError(f"older_than must not be negative, it is {older_than}")
        try:
            before = timestamp(self._clock() - older_than)
        except OverflowError:  # before the year 1
            return 0
        purge = {"before": before, "limit": PURGE_BATCH}
        deleted = 0
        while batch := await self._database.run(Statement(_PURGE, purge)):
            deleted += len(batch)
        return deleted

    async def _settle(self, operation: Operation[T]) -> T:
        """Settle even for a caller that is cancelled meanwhile: what became of the event is known, and must be kept."""
        try:
            return await self._database.run_uncancelled(operation)
        finally:
            self._may_be_due.set()

    async def _write(self, operation: Operation[T]) -> T:
        """Run an operation after which an event may be due: its own, or the next in its aggregate's line."""
        try:
            return await self._database.run(operation)
        finally:
            self._may_be_due.set()


def _event_row(
    now: datetime, event_type: str, aggregate_id: str, payload: Payload, occurrence_id: str | None = None
) -> dict[str, str]:
    payload_json, idempotency_key = seal_envelope(event_type, aggregate_id, payload, occurrence_id)
    return {
        "id": new_id(now),
        "event_type": event_type,
        "aggregate_id": aggregate_id,
        "payload_json": payload_json,
        "idempotency_key": idempotency_key,
        "now": timestamp(now),
    }


def _held(event: OutboxEvent, now: datetime) -> dict[str, Any]:
    return {"sequence": event.sequence, "token": event.lease_token, "now": timestamp(now)}


def _quarantine(failure: dict[str, Any], connection: sqlite3.Connection) -> DeadLetterRecord | None:
    """PROCESSING -> DEAD_LETTER and the row of the dead-letter queue; None: the lease was lost."""
    if not connection.execute(_QUARANTINE, failure).fetchall():
        return None
    return _dead_letter(connection.execute(_INSERT_DEAD_LETTER, failure | {"dlq_id": str(uuid4())}).fetchall()[0])


def _event(row: Sequence[Any]) -> OutboxEvent:
    return OutboxEvent.model_validate(dict(zip(OutboxEvent.model_fields, row, strict=True)))


def _dead_letter(row: Sequence[Any]) -> DeadLetterRecord:
    """Decode for the eyes of an operator: what made the event a dead letter may be that it is no text."""
    readable = [value.decode(errors="replace") if isinstance(value, bytes) else _valid_utf8(value) for value in row]
    return DeadLetterRecord.model_validate(dict(zip(DeadLetterRecord.model_fields, readable, strict=True)))


def _refuse_negative(limit: int) -> None:
    if limit < 0:  # to SQLite it would mean: all there are
        raise ValueError(f"limit must not be negative, it is {limit}")


def _storable(text: str) -> str:
    """Return what fits into a column of a few KiB and is valid UTF-8, whatever a remote side put into it."""
    return _valid_utf8(text[:ERROR_MESSAGE_LIMIT])


def _valid_utf8(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


def _moment_after(now: datetime, seconds: float) -> str:
    if not 0 <= seconds < math.inf:
        raise ValueError(f"a time span must be a finite number of seconds, not negative: {seconds}")
    return timestamp(now + timedelta(seconds=min(seconds, LONGEST_WAIT_SECONDS)))


@contextmanager
def _duplicate_key_as_such(event_row: dict[str, str]) -> Generator[None, None, None]:
    try:
        yield
    except sqlite3.IntegrityError as error:
        if "outbox.idempotency_key" in str(error):
            raise DuplicateEventError(event_row["idempotency_key"]) from error
        raise
