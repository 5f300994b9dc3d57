"""What is stored and what is sent: the event's four states, the records, and the canonical JSON behind the key.

Article: Section 1 (the four-state life of an event) and Section 2 (idempotency by canonical SHA-256).
"""

import hashlib
import json
import math
import re
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from enum import StrEnum
from typing import Annotated, Any, NoReturn, cast

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, PlainSerializer, field_validator

# --- Section 1: the life of an event -------------------------------------------------------------------


class EventStatus(StrEnum):
    """The four states of an event (Section 1)."""

    PENDING = "PENDING"
    PROCESSING = "PROCESSING"
    PUBLISHED = "PUBLISHED"
    DEAD_LETTER = "DEAD_LETTER"


LEGAL_STATUS_CHANGES: frozenset[tuple[EventStatus, EventStatus]] = frozenset(
    {
        (EventStatus.PENDING, EventStatus.PROCESSING),  # claimed
        (EventStatus.PROCESSING, EventStatus.PENDING),  # retried later, or released
        (EventStatus.PROCESSING, EventStatus.PUBLISHED),
        (EventStatus.PROCESSING, EventStatus.DEAD_LETTER),
        (EventStatus.PROCESSING, EventStatus.PROCESSING),  # an expired lease, claimed again
        (EventStatus.DEAD_LETTER, EventStatus.PENDING),  # replayed
    }
)
"""Every status change there is. The database refuses all others: its trigger is written from this table."""


# --- The records ---------------------------------------------------------------------------------------

_VISIBLE_ASCII = r"^[\x21-\x7e]{1,200}$"
HeaderToken = Annotated[str, Field(pattern=_VISIBLE_ASCII)]
"""1 to 200 visible ASCII characters: what is sent as a header can never break one."""

_AMOUNT_DIGITS = 38
Amount = Annotated[Decimal, PlainSerializer(lambda amount: format(amount, "f"), when_used="json")]
"""Money. In JSON a decimal string without an exponent: "100", where str() may say "1E+2"."""

_UNEXPECTED_FIELD_IS_AN_ERROR = ConfigDict(frozen=True, extra="forbid")


class OrderCreate(BaseModel):
    """An order as a client sends it. `amount` is exact: a `Decimal`, an int or a decimal string, never a float."""

    model_config = _UNEXPECTED_FIELD_IS_AN_ERROR

    customer_email: str = Field(min_length=3, max_length=320, pattern=r"^[^@\s\x00-\x1f]+@[^@\s\x00-\x1f]+$")
    amount: Amount = Field(ge=0, allow_inf_nan=False, max_digits=_AMOUNT_DIGITS)

    @field_validator("amount", mode="before")
    @classmethod
    def _amount_is_exact(cls, amount: Any) -> Any:
        # A float has lost the cents before it arrives here: 0.1 + 0.2 is not 0.3.
        if isinstance(amount, float | bool):
            raise ValueError(f"must be a Decimal, an int or a decimal string, not {type(amount).__name__}")
        return amount

    @field_validator("amount")
    @classmethod
    def _amount_can_be_written_out(cls, amount: Decimal) -> Decimal:
        if amount.adjusted() < -_AMOUNT_DIGITS:  # max_digits lets 0E-999999999 through: a gigabyte of zeros
            raise ValueError(f"must not have more than {_AMOUNT_DIGITS} decimal places")
        return amount.copy_abs()  # not -0


class OrderRecord(BaseModel):
    """A row of `orders`."""

    model_config = _UNEXPECTED_FIELD_IS_AN_ERROR

    id: str
    customer_email: str
    amount: Amount
    status: str
    created_at: AwareDatetime


class OutboxEvent(BaseModel):
    """A row of `outbox` as its reader sees it. `lease_token` is the fence: only its holder can settle the event."""

    model_config = _UNEXPECTED_FIELD_IS_AN_ERROR

    id: HeaderToken
    event_type: HeaderToken
    aggregate_id: HeaderToken
    sequence: int = Field(ge=1)
    payload_json: str
    idempotency_key: HeaderToken
    status: EventStatus
    retry_count: int = Field(ge=0)
    last_error: str | None
    created_at: AwareDatetime
    updated_at: AwareDatetime
    lease_token: str | None = None

    @field_validator("payload_json")
    @classmethod
    def _payload_can_be_sent(cls, payload_json: str) -> str:
        try:
            payload_json.encode()
        except UnicodeEncodeError:  # how a store hands on bytes that are no text
            raise ValueError("is not valid UTF-8") from None
        return payload_json


class DeadLetterRecord(BaseModel):
    """A row of `dead_letter_queue`."""

    model_config = _UNEXPECTED_FIELD_IS_AN_ERROR

    id: str
    original_event_id: str
    payload_json: str
    failure_reason: str
    quarantined_at: AwareDatetime


class OutboxStats(BaseModel):
    """How many events are in each state, and how long the oldest PENDING one has waited (seconds; None: none waits)."""

    model_config = _UNEXPECTED_FIELD_IS_AN_ERROR

    counts: dict[EventStatus, int]
    oldest_pending_age_seconds: float | None


class DuplicateEventError(ValueError):
    """An event with this idempotency key is in the outbox already."""

    def __init__(self, idempotency_key: str) -> None:
        self.idempotency_key = idempotency_key
        super().__init__(idempotency_key)

    def __str__(self) -> str:
        return (
            f"an event with the idempotency key {self.idempotency_key} exists already: same type, aggregate and "
            "payload. If it is another occurrence of the same thing, tell the two apart with occurrence_id"
        )


# --- Section 2: canonical JSON and the idempotency key -------------------------------------------------


_LARGEST_EXPONENT = 1000
_NESTED_TOO_DEEPLY = "{} is nested too deeply, or contains itself"

Payload = dict[str, Any] | str | BaseModel
"""A dict, a JSON text, or a pydantic model."""


def canonicalize_json_payload(payload: Payload) -> str:
    """Return the one JSON text of a payload: keys sorted, no white space (Section 2).

    Without floats and with integers within 2**53 the result equals RFC 8785; a float is written as Python writes it.
    A `Decimal` becomes a string, so it stays exact, and never has an exponent: "100", not "1E+2".

    Raises `TypeError` for a value that JSON does not have (set, bytes, a key that is no string), and `ValueError`
    for one that would not survive the journey: NaN, Infinity, a duplicate key, a lone surrogate, invalid JSON,
    nesting without end.
    """
    return _canonical_text(_json_value(payload), "payload")


def compute_idempotency_key(payload: Payload) -> str:
    """Return the SHA-256 of the canonical JSON as 64 hex digits (Section 2).

    The same data gives the same key in any key order and any white space. Raises as `canonicalize_json_payload`.
    """
    return _sha256(canonicalize_json_payload(payload))


def seal_envelope(
    event_type: str, aggregate_id: str, payload: Payload, occurrence_id: str | None = None
) -> tuple[str, str]:
    """Return the text that is stored and sent for an event, and its idempotency key.

    Type and aggregate are part of the text, so two different events never share a key. Raises as
    `canonicalize_json_payload`, and `TypeError` or `ValueError` for a type or aggregate that is not a string of 1 to
    200 visible ASCII characters.
    """
    for field, value in (("event_type", event_type), ("aggregate_id", aggregate_id)):
        if not isinstance(value, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"{field} must be a string, not {value!r}")
        if not re.fullmatch(_VISIBLE_ASCII, value):
            raise ValueError(f"{field} must be 1 to 200 visible ASCII characters without a space, not {value!r}")
    envelope = {"aggregate_id": aggregate_id, "data": _json_value(payload), "type": event_type}
    if occurrence_id is not None:
        envelope["occurrence_id"] = occurrence_id
    payload_json = _canonical_text(envelope, "event")
    return payload_json, _sha256(payload_json)


def _json_value(payload: Payload) -> Any:
    if isinstance(payload, BaseModel):
        return payload.model_dump(mode="json")
    if isinstance(payload, str):
        try:
            return json.loads(payload, object_pairs_hook=_refuse_duplicate_keys, parse_constant=_refuse_constant)
        except json.JSONDecodeError as error:
            raise ValueError(f"payload is no valid JSON: {error}") from None
        except RecursionError:
            raise ValueError(_NESTED_TOO_DEEPLY.format("payload")) from None
    if isinstance(payload, dict):  # pyright: ignore[reportUnnecessaryIsInstance]
        return payload
    raise TypeError(f"Unsupported payload type: {type(payload).__name__}")


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


_COMPACT_JSON = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False)


def _canonical_text(value: Any, path: str) -> str:
    try:
        return _COMPACT_JSON.encode(_canonical(value, path))
    except RecursionError:
        raise ValueError(_NESTED_TOO_DEEPLY.format(path)) from None


def _canonical(value: Any, path: str) -> Any:
    """Return `value` with sorted keys, or raise an error that names the place."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, str):
        return _refuse_lone_surrogates(value, path)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{path} is {value}, which JSON does not have")
        return value
    if isinstance(value, Decimal):
        if not value.is_finite():
            raise ValueError(f"{path} is {value}, which JSON does not have")
        if abs(value.adjusted()) > _LARGEST_EXPONENT:  # written out, a short one could take gigabytes
            raise ValueError(f"{path} is {value}: an exponent beyond {_LARGEST_EXPONENT} is not written out")
        return format(value, "f")
    if isinstance(value, list | tuple):
        items = cast("Sequence[Any]", value)
        return [_canonical(item, f"{path}[{index}]") for index, item in enumerate(items)]
    if isinstance(value, dict):
        members = cast("Mapping[Any, Any]", value)
        for key in members:
            if not isinstance(key, str):
                raise TypeError(f"{path} has the key {key!r}, a {type(key).__name__}: a JSON key is a string")
            _refuse_lone_surrogates(key, f"a key of {path}")
        # RFC 8785 sorts by UTF-16 code units; json.dumps(sort_keys=True) sorts by code points, which puts an emoji
        # and a character such as U+FB33 the other way round, and gives other systems another key.
        return {key: _canonical(members[key], f"{path}.{key}") for key in sorted(members, key=_utf16)}
    raise TypeError(f"{path} is a {type(value).__name__}, which JSON does not have")


def _utf16(text: str) -> bytes:
    return text.encode("utf-16-be")


def _refuse_lone_surrogates(text: str, path: str) -> str:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ValueError(f"{path} has a lone surrogate, which UTF-8 cannot carry: {text!r}") from None
    return text


def _refuse_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        # json.loads alone keeps the last one: two different texts would get one key.
        [(duplicate, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"payload has the key {duplicate!r} twice in one object")
    return members


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"payload has {name}, which JSON does not have")


# --- Ids and timestamps --------------------------------------------------------------------------------


def new_id(now: datetime) -> str:
    """Return a UUID of version 7: random, yet in the order of time, so new rows go to the end of each index."""
    milliseconds = int(now.timestamp() * 1000)
    bits = milliseconds << 80 | 0x7 << 76 | secrets.randbits(12) << 64 | 0b10 << 62 | secrets.randbits(62)
    digits = f"{bits:032x}"
    return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


def timestamp(moment: datetime) -> str:
    """Return the text of a moment in UTC, always of the same width, so that text order is time order.

    A bare isoformat() drops .000000 and keeps other zones. Raises `ValueError` for a moment without a zone.
    """
    if moment.tzinfo is None:
        raise ValueError(f"a moment needs a time zone: {moment!r}")
    return moment.astimezone(UTC).isoformat(timespec="microseconds")
