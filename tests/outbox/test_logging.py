"""One log record, one line of JSON with the article's fields (Section 6)."""

import io
import json
import logging
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outbox.config import AppConfig, JsonLogFormatter, configure_logging
from outbox.database import SQLiteStore
from outbox.dispatcher import OutboxDispatcher
from outbox.mock_consumer import InMemoryIdempotencyStore, create_app, serve
from tests.outbox.conftest import FakeClock
from tests.outbox.support import ORDER


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    """Where the package's log goes for the length of a test."""
    logger = logging.getLogger("outbox")
    before = logger.handlers, logger.level, logger.propagate
    stream = io.StringIO()
    configure_logging(stream=stream)
    yield stream
    logger.handlers, logger.level, logger.propagate = before


def one_line(stream: io.StringIO) -> dict[str, Any]:
    text = stream.getvalue()
    assert len(text.splitlines()) == 1  # also by the line ends of Unicode
    assert text.endswith("\n")
    return strict_json(text)


def strict_json(text: str) -> dict[str, Any]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    line = json.loads(text, parse_constant=refuse)
    assert isinstance(line, dict)
    return line


logger = logging.getLogger("outbox.tests")


def test_a_line_has_the_article_s_fields_in_its_order_and_then_the_extras(stream: io.StringIO) -> None:
    logger.info("It happened.", extra={"event_id": "e-1", "retry_count": 0})

    line = one_line(stream)
    assert list(line) == ["timestamp", "level", "logger", "message", "event_id", "retry_count"]
    assert (line["level"], line["logger"], line["message"]) == ("INFO", "outbox.tests", "It happened.")
    assert (line["event_id"], line["retry_count"]) == ("e-1", 0)
    written_at = datetime.fromisoformat(line["timestamp"])
    assert written_at.utcoffset() == timedelta(0)
    assert abs(datetime.now(UTC) - written_at) < timedelta(minutes=1)
    assert len(line["timestamp"]) == len("2026-10-22T14:39:12.705812+00:00")


def test_a_timestamp_on_the_full_second_has_the_same_width() -> None:
    record = logging.makeLogRecord({"created": 1_000_000_000.0})
    assert strict_json(JsonLogFormatter().format(record))["timestamp"] == "2001-09-09T01:46:40.000000+00:00"


def test_extras_never_replace_the_article_s_fields(stream: io.StringIO) -> None:
    logger.info("real", extra={"timestamp": "never", "level": "DEBUG", "logger": "somebody else"})

    line = one_line(stream)
    assert (line["level"], line["logger"], line["message"]) == ("INFO", "outbox.tests", "real")
    datetime.fromisoformat(line["timestamp"])


class Rude:
    def __str__(self) -> str:
        raise RuntimeError("no text for you")

    __repr__ = __str__


def _circular() -> list[Any]:
    circular: list[Any] = []
    circular.append(circular)
    return circular


def _deep() -> list[Any]:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    return deep


@pytest.mark.parametrize(
    "value",
    [
        *(float("nan"), float("inf"), [float("-inf")], Decimal("1.10"), 10**5000, 1j, b"\xff", None, True),
        *({1, 2}, {(1, 2): 3}, {None: {"x": object()}}, datetime(2026, 1, 1, tzinfo=UTC), Path("/x"), ValueError("x")),
        *("\ud800", {"\udfff": "\udfff"}, "a\nb\rc\x0b\x0c\x1c\x85\u2028\u2029d", "\x00\x1b[31m\x9b", '"\\', "é😀"),
        *(Rude(), [Rude()], {"x": Rude()}, _circular(), _deep()),
    ],
    ids=lambda value: type(value).__name__,
)
def test_whatever_an_extra_holds_the_line_is_one_json_object(stream: io.StringIO, value: object) -> None:
    logger.warning("It happened.", extra={"odd": value, "event_id": "e-1"})

    line = one_line(stream)
    assert list(line) == ["timestamp", "level", "logger", "message", "odd", "event_id"]
    assert line["event_id"] == "e-1"


def test_text_in_an_extra_reads_back_as_it_was(stream: io.StringIO) -> None:
    text = "café 😀\n\t\u2028\ud800\"'\\"
    logger.warning("%s", text, extra={"error": text})

    line = one_line(stream)
    assert line["error"] == text
    assert line["message"] == text


@settings(deadline=None)
@given(message=st.text(st.characters()), extra=st.dictionaries(st.text(st.characters()).map("x{}".format), st.text()))
def test_any_text_is_written_in_ascii_that_no_stream_refuses(message: str, extra: dict[str, str]) -> None:
    record = logging.makeLogRecord({"msg": message, **extra})

    text = JsonLogFormatter().format(record)
    assert text.isascii()
    assert "\n" not in text
    assert "\r" not in text
    line = strict_json(text)
    assert line["message"] == message
    assert extra.items() <= line.items()


def test_an_exception_and_its_cause_are_part_of_the_line(stream: io.StringIO) -> None:
    try:
        try:
            raise KeyError("cause\nwith a line end \udc80")
        except KeyError as cause:
            raise RuntimeError("effect") from cause
    except RuntimeError:
        logger.exception("It failed.")

    line = one_line(stream)
    assert line["level"] == "ERROR"
    assert line["exception"].startswith("Traceback (most recent call last):\n")
    assert line["exception"].endswith("RuntimeError: effect")
    assert "KeyError" in line["exception"]


def test_an_exception_group_is_part_of_the_line(stream: io.StringIO) -> None:
    logger.error("It failed.", exc_info=ExceptionGroup("two", [ValueError("one"), OSError("other")]))
    assert "ValueError: one" in one_line(stream)["exception"]


def test_configuring_again_replaces_the_first_stream_and_does_not_write_twice(stream: io.StringIO) -> None:
    second = io.StringIO()
    configure_logging("WARNING", second)
    logger.info("too quiet")
    logger.warning("loud enough")

    assert stream.getvalue() == ""
    assert one_line(second)["message"] == "loud enough"


async def test_the_four_cycles_log_the_article_s_fields(
    stream: io.StringIO, store: SQLiteStore, clock: FakeClock
) -> None:
    async with serve(create_app(InMemoryIdempotencyStore())) as url:
        await store.create_order_with_outbox_event(ORDER)
        await OutboxDispatcher(AppConfig(consumer_endpoint=f"{url}/webhooks"), store).process_batch()
        await store.create_order_with_outbox_event(ORDER)
        failing = AppConfig(consumer_endpoint=f"{url}/webhooks?simulate_failure=true", max_delivery_attempts=2)
        for _ in range(2):
            await OutboxDispatcher(failing, store).process_batch()
            clock.advance(1.0)

    lines = [strict_json(line) for line in stream.getvalue().splitlines()]
    common = ["timestamp", "level", "logger", "message"]
    assert [(line["logger"], line["level"], [name for name in line if name not in common]) for line in lines] == [
        ("outbox.database", "INFO", ["order_id", "event_id", "idempotency_key"]),
        ("outbox.mock_consumer", "INFO", ["idempotency_key", "side_effects_count"]),
        ("outbox.dispatcher", "INFO", ["event_id", "status_code", "retry_count"]),
        ("outbox.database", "INFO", ["order_id", "event_id", "idempotency_key"]),
        ("outbox.dispatcher", "WARNING", ["event_id", "retry_count", "backoff_seconds", "error"]),
        ("outbox.dispatcher", "ERROR", ["event_id", "dlq_id", "retry_count", "error"]),
    ]
    assert lines[1]["side_effects_count"] == 1
    assert (lines[2]["status_code"], lines[2]["retry_count"]) == (200, 0)
    assert (lines[4]["retry_count"], lines[4]["backoff_seconds"]) == (1, 0.5)
    assert lines[5]["retry_count"] == 2
