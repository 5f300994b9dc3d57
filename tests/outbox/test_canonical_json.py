"""Canonical JSON, and the idempotency key that is made of it (Section 2)."""

import hashlib
import json
from collections.abc import Callable
from datetime import UTC, datetime
from decimal import Decimal
from enum import IntEnum, StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import pytest
import rfc8785
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from outbox.database import SQLiteStore
from outbox.models import (
    DuplicateEventError,
    OrderCreate,
    canonicalize_json_payload,
    compute_idempotency_key,
    seal_envelope,
)
from tests.outbox.support import add_event, rows

# --- the same text as RFC 8785, by an independent implementation ---

_text = st.text(
    st.one_of(
        st.characters(codec="utf-8"),
        st.characters(min_codepoint=0xE000, max_codepoint=0xFFFF),  # above the surrogates in UTF-16, below the astral
        st.characters(min_codepoint=0x10000, max_codepoint=0x10FFFF),
        st.sampled_from('\x00\x1f"\\/\x7f\u2028\u2029\ufeff'),
    )
)
_scalars = st.none() | st.booleans() | st.integers(-(2**53) + 1, 2**53 - 1) | _text
_values = st.recursive(
    _scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_text, inner, max_size=4), max_leaves=25
)
_payloads = st.dictionaries(_text, _values, max_size=6)


@settings(deadline=None)
@given(payload=_payloads)
@example(payload={"\U0001f600": 1, "\ufb33": 2, "\ue000": 3, "a": 4})
@example(payload={"": {"": []}, "\x00": "\x7f"})
def test_without_floats_the_canonical_text_is_that_of_rfc_8785(payload: dict[str, Any]) -> None:
    assert canonicalize_json_payload(payload).encode() == rfc8785.dumps(payload)


@settings(deadline=None)
@given(payload=_payloads, indent=st.sampled_from([None, 0, 3]), ensure_ascii=st.booleans())
def test_the_key_is_the_same_for_the_dict_and_for_any_json_text_of_it(
    payload: dict[str, Any], indent: int | None, ensure_ascii: bool
) -> None:
    reversed_order = dict(reversed(payload.items()))
    text = json.dumps(reversed_order, indent=indent, ensure_ascii=ensure_ascii)

    key = compute_idempotency_key(payload)
    assert key == compute_idempotency_key(text)
    assert key == hashlib.sha256(rfc8785.dumps(payload)).hexdigest()


@settings(deadline=None)
@given(one=_payloads, other=_payloads)
def test_different_data_has_different_keys(one: dict[str, Any], other: dict[str, Any]) -> None:
    same = rfc8785.dumps(one) == rfc8785.dumps(other)
    assert (compute_idempotency_key(one) == compute_idempotency_key(other)) == same


@settings(deadline=None)
@given(payload=_payloads)
def test_canonical_text_is_its_own_canonical_form(payload: dict[str, Any]) -> None:
    text = canonicalize_json_payload(payload)
    assert canonicalize_json_payload(text) == text


def test_keys_are_sorted_by_utf_16_code_units_and_not_by_code_points() -> None:
    assert canonicalize_json_payload({"\ufb33": 1, "\U0001f600": 2}) == '{"\U0001f600":2,"\ufb33":1}'


def test_integers_of_any_size_stay_exact() -> None:
    assert canonicalize_json_payload({"n": 2**64 + 1}) == '{"n":18446744073709551617}'
    assert canonicalize_json_payload('{"n": 18446744073709551617}') == '{"n":18446744073709551617}'


def test_floats_are_written_as_the_shortest_text_that_reads_back() -> None:
    assert canonicalize_json_payload({"x": 0.1, "y": 1e300, "z": -0.0}) == '{"x":0.1,"y":1e+300,"z":-0.0}'


def test_enums_and_tuples_are_written_as_their_values() -> None:
    class Colour(StrEnum):
        RED = "red"

    class Level(IntEnum):
        HIGH = 3

    payload = {"colour": Colour.RED, "level": Level.HIGH, Colour.RED: (1, 2)}
    assert canonicalize_json_payload(payload) == '{"colour":"red","level":3,"red":[1,2]}'


# --- pydantic models ---


class Delivered(BaseModel):
    order_id: str
    at: datetime
    weight: float = 0.0


def test_a_model_and_the_dict_of_its_json_have_the_same_key() -> None:
    model = Delivered(order_id="1", at=datetime(2026, 1, 1, tzinfo=UTC))
    assert canonicalize_json_payload(model) == '{"at":"2026-01-01T00:00:00Z","order_id":"1","weight":0.0}'
    assert compute_idempotency_key(model) == compute_idempotency_key(model.model_dump(mode="json"))


def test_a_model_is_held_to_the_same_rules_as_a_dict() -> None:
    with pytest.raises(ValueError, match=r"payload\.weight is nan"):
        canonicalize_json_payload(Delivered(order_id="1", at=datetime(2026, 1, 1, tzinfo=UTC), weight=float("nan")))


# --- refused, and the error says where ---


@pytest.mark.parametrize(
    ("payload", "error", "place"),
    [
        ({"a": float("nan")}, ValueError, r"payload\.a is nan"),
        ({"a": [0, float("inf")]}, ValueError, r"payload\.a\[1\] is inf"),
        ({"a": {"b": -float("inf")}}, ValueError, r"payload\.a\.b is -inf"),
        ({"a": Decimal("NaN")}, ValueError, r"payload\.a is NaN"),
        ({"a": Decimal("sNaN")}, ValueError, r"payload\.a is sNaN"),
        ({"a": Decimal("-Infinity")}, ValueError, r"payload\.a is -Infinity"),
        ({"a": Decimal("1E+999999")}, ValueError, r"payload\.a is 1E\+999999: an exponent"),
        ({"a": Decimal("0E-999999")}, ValueError, r"payload\.a is 0E-999999: an exponent"),
        ({"a": {1, 2}}, TypeError, r"payload\.a is a set"),
        ({"a": frozenset({1})}, TypeError, r"payload\.a is a frozenset"),
        ({"a": [b"x"]}, TypeError, r"payload\.a\[0\] is a bytes"),
        ({"a": bytearray(b"x")}, TypeError, r"payload\.a is a bytearray"),
        ({"a": datetime(2026, 1, 1, tzinfo=UTC)}, TypeError, r"payload\.a is a datetime"),
        ({"a": object()}, TypeError, r"payload\.a is a object"),
        ({"a": MappingProxyType({})}, TypeError, r"payload\.a is a mappingproxy"),
        ({"a": 1j}, TypeError, r"payload\.a is a complex"),
        ({1: "x"}, TypeError, r"payload has the key 1, a int"),
        ({"a": {None: "x"}}, TypeError, r"payload\.a has the key None, a NoneType"),
        ({"a": {True: "x"}}, TypeError, r"payload\.a has the key True, a bool"),
        ({"a": {("b",): "x"}}, TypeError, r"payload\.a has the key \('b',\), a tuple"),
        ({"a": "\ud800"}, ValueError, r"payload\.a has a lone surrogate"),
        ({"a": ["x\udfffy"]}, ValueError, r"payload\.a\[0\] has a lone surrogate"),
        ({"a": {"\udc80": 1}}, ValueError, r"a key of payload\.a has a lone surrogate"),
        ('{"a": NaN}', ValueError, r"payload has NaN"),
        ('{"a": -Infinity}', ValueError, r"payload has -Infinity"),
        ('{"a": 1e400}', ValueError, r"payload\.a is inf"),
        ('{"a": "\\ud800"}', ValueError, r"payload\.a has a lone surrogate"),
        ('{"\\udfff": 1}', ValueError, r"a key of payload has a lone surrogate"),
        ('{"a": 1, "b": {"c": 1, "c": 1}}', ValueError, r"payload has the key 'c' twice"),
        ('{"a": 1, "\\u0061": 2}', ValueError, r"payload has the key 'a' twice"),
        ('{"a": 1', ValueError, r"payload is no valid JSON: .* line 1 column 8"),
        ("", ValueError, r"payload is no valid JSON"),
        ("\ufeff{}", ValueError, r"payload is no valid JSON"),
        ("{'a': 1}", ValueError, r"payload is no valid JSON"),
    ],
)
def test_what_json_cannot_carry_is_refused_and_the_error_names_the_place(
    payload: Any, error: type[Exception], place: str
) -> None:
    for function in (canonicalize_json_payload, compute_idempotency_key):
        with pytest.raises(error, match=place):
            function(payload)
    with pytest.raises(error):
        seal_envelope("order.created", "order-1", payload)


@pytest.mark.parametrize("payload", [None, 1, 1.5, True, [1], (1,), b"{}", {1}, object(), Delivered])
def test_a_payload_of_another_type_is_refused_by_its_name(payload: Any) -> None:
    with pytest.raises(TypeError, match=f"Unsupported payload type: {type(payload).__name__}"):
        canonicalize_json_payload(payload)


def _circular() -> dict[str, Any]:
    payload: dict[str, Any] = {}
    payload["self"] = [payload]
    return payload


def _deep() -> dict[str, Any]:
    payload: dict[str, Any] = {}
    for _ in range(100_000):
        payload = {"a": payload}
    return payload


@pytest.mark.parametrize(
    "payload", [_circular, _deep, lambda: "[" * 200_000, lambda: '{"a":' * 200_000 + "1" + "}" * 200_000]
)
def test_a_structure_without_end_is_refused_as_such(payload: Callable[[], dict[str, Any] | str]) -> None:
    for refusing in (canonicalize_json_payload, lambda payload: seal_envelope("order.created", "order-1", payload)):
        with pytest.raises(ValueError, match=r"(payload|event) is nested too deeply, or contains itself"):
            refusing(payload())


def test_a_duplicate_among_very_many_keys_is_found_at_once() -> None:
    text = "{" + ",".join(f'"key-{number}": 1' for number in range(200_000)) + ', "key-199999": 2}'
    with pytest.raises(ValueError, match="'key-199999' twice"):
        canonicalize_json_payload(text)


async def test_a_refused_payload_leaves_no_event(store: SQLiteStore, db_path: Path) -> None:
    with pytest.raises(TypeError, match=r"event\.data\.tags is a set"):
        await add_event(store, tags={1})
    assert rows(db_path, "SELECT count(*) FROM outbox") == [(0,)]


# --- money ---

_AMOUNTS = [
    ("10.10", "10.10"),
    ("0.1", "0.1"),
    ("0.30", "0.30"),
    ("123456789012345", "123456789012345"),
    ("1234567890123.45", "1234567890123.45"),
    ("0.00000000000000000000000000000000000001", "0.00000000000000000000000000000000000001"),
    ("1E+2", "100"),
    ("1E-7", "0.0000001"),
    ("1.50E+10", "15000000000"),
    ("9" * 38, "9" * 38),
    ("0", "0"),
    ("0.00", "0.00"),
    ("-0", "0"),
    (149, "149"),
    (Decimal("2.50"), "2.50"),
]


@pytest.mark.parametrize(("amount", "written"), _AMOUNTS)
async def test_an_amount_survives_exactly_and_without_an_exponent(
    store: SQLiteStore, db_path: Path, amount: str | int | Decimal, written: str
) -> None:
    order_create = OrderCreate.model_validate({"customer_email": "ada@example.com", "amount": amount})
    order, event = await store.create_order_with_outbox_event(order_create)

    assert rows(db_path, "SELECT amount, typeof(amount) FROM orders") == [(written, "text")]
    assert json.loads(event.payload_json)["data"]["amount"] == written
    assert order.amount == Decimal(amount)
    assert json.loads(canonicalize_json_payload(order_create))["amount"] == written


@settings(deadline=None)
@given(amount=st.decimals(min_value=0, max_value=10**20, allow_nan=False, allow_infinity=False, places=18))
def test_any_decimal_in_a_payload_reads_back_as_the_same_decimal(amount: Decimal) -> None:
    text = json.loads(canonicalize_json_payload({"amount": amount}))["amount"]
    assert "E" not in text
    assert Decimal(text).as_tuple() == amount.as_tuple()


@pytest.mark.parametrize(("amount", "written"), [("1E+3", "1000"), ("1E-9", "0.000000001"), ("-2.50", "-2.50")])
def test_a_decimal_anywhere_in_a_payload_is_written_without_an_exponent(amount: str, written: str) -> None:
    assert canonicalize_json_payload({"a": [Decimal(amount)]}) == f'{{"a":["{written}"]}}'


@pytest.mark.parametrize(
    "amount",
    [
        *(1.5, 0.1, float("nan"), True, None, b"1", [1], ""),
        *("NaN", "Infinity", "-Infinity", "-0.01", "1e999999999", "0E-999999999", "9" * 39, "1,5", "1.5 EUR"),
        *(Decimal("NaN"), Decimal("sNaN"), Decimal("Infinity"), Decimal("-1")),
    ],
)
def test_an_amount_that_is_inexact_infinite_or_negative_is_refused_by_its_field(amount: Any) -> None:
    with pytest.raises(ValidationError) as refused:
        OrderCreate.model_validate({"customer_email": "ada@example.com", "amount": amount})
    assert [error["loc"] for error in refused.value.errors()] == [("amount",)]


# --- the envelope ---


def test_the_envelope_holds_type_aggregate_and_data_in_canonical_form() -> None:
    payload_json, key = seal_envelope("order.created", "order-1", {"b": 1, "a": Decimal("1.0")})
    assert payload_json == '{"aggregate_id":"order-1","data":{"a":"1.0","b":1},"type":"order.created"}'
    assert key == hashlib.sha256(payload_json.encode()).hexdigest()
    assert key == compute_idempotency_key(payload_json)


_tokens = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=1, max_size=6)
_events = st.tuples(_tokens, _tokens, _payloads, st.none() | _text)


@settings(deadline=None)
@given(one=_events, other=_events)
@example(one=("a", "b", {}, None), other=("b", "a", {}, None))
@example(one=("a", "b", {}, None), other=("a", "b", {}, ""))
@example(one=("a", "b", {"occurrence_id": "x"}, None), other=("a", "b", {}, "x"))
def test_two_different_events_never_share_a_key(one: tuple[Any, ...], other: tuple[Any, ...]) -> None:
    assert (seal_envelope(*one)[1] == seal_envelope(*other)[1]) == (one == other)


async def test_occurrence_id_tells_two_equal_events_apart(store: SQLiteStore, db_path: Path) -> None:
    event: dict[str, Any] = {"event_type": "reminder.sent", "aggregate_id": "order-1", "payload": {"to": "ada"}}
    async with store.transaction() as conn:
        first = await store.add_event(conn, **event)
        with pytest.raises(DuplicateEventError, match="tell the two apart with occurrence_id"):
            await store.add_event(conn, **event)
        second = await store.add_event(conn, **event, occurrence_id="2026-02")
        with pytest.raises(DuplicateEventError) as refused:
            await store.add_event(conn, **event, occurrence_id="2026-02")

    assert refused.value.idempotency_key == second.idempotency_key != first.idempotency_key
    assert json.loads(second.payload_json)["occurrence_id"] == "2026-02"
    assert "occurrence_id" not in json.loads(first.payload_json)
    assert rows(db_path, "SELECT count(*) FROM outbox") == [(2,)]


@pytest.mark.parametrize("bad", ["", "a b", "a\n", "a\r\nX-Evil: 1", "\x00", "é", "\x7f", "x" * 201])
@pytest.mark.parametrize("field", ["event_type", "aggregate_id"])
def test_what_could_break_a_header_is_refused_where_the_event_is_created(field: str, bad: str) -> None:
    event = {"event_type": "order.created", "aggregate_id": "order-1"} | {field: bad}
    with pytest.raises(ValueError, match=f"{field} must be 1 to 200 visible ASCII characters"):
        seal_envelope(**event, payload={})


@pytest.mark.parametrize("bad", [None, 1, b"order.created"])
@pytest.mark.parametrize("field", ["event_type", "aggregate_id"])
def test_a_type_or_aggregate_that_is_no_string_is_refused_by_its_name(field: str, bad: Any) -> None:
    event = {"event_type": "order.created", "aggregate_id": "order-1"} | {field: bad}
    with pytest.raises(TypeError, match=f"{field} must be a string"):
        seal_envelope(**cast("dict[str, str]", event), payload={})
