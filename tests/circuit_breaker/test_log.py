"""The telemetry: one JSON object a line, and no flood (article, Sections 4.2 and 6)."""

import asyncio
import io
import json
import logging
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from circuit_breaker import CircuitBreaker, CircuitBreakerOpenException, JsonStructuredFormatter, Transition
from circuit_breaker.testing import FakeClock, Hold, ScriptedUpstream, Slow
from tests.circuit_breaker.support import UpstreamError, succeed

Lines = Callable[[], list[dict[str, Any]]]


@pytest.fixture
def lines() -> Iterator[Lines]:
    """What a collector would read: every line must be one JSON object."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonStructuredFormatter())
    logger = logging.getLogger("circuit_breaker")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)


async def reject(breaker: CircuitBreaker, times: int) -> None:
    for _ in range(times):
        with pytest.raises(CircuitBreakerOpenException):
            await breaker.call(ScriptedUpstream())


async def test_an_outage_reads_as_in_the_article(breaker: CircuitBreaker, clock: FakeClock, lines: Lines) -> None:
    upstream = ScriptedUpstream(*[Slow(0.105, then=UpstreamError)] * 3, Slow(0.018), Slow(0.018), clock=clock)
    await asyncio.gather(*(breaker.call(upstream) for _ in range(3)), return_exceptions=True)
    await reject(breaker, times=1)
    clock.advance(10.0)
    await breaker.call(upstream)
    await breaker.call(upstream)

    logged = lines()
    assert [(line["state"], line["event"], line["consecutive_failures"]) for line in logged] == [
        ("CLOSED", "call_failed", 1),
        ("CLOSED", "call_failed", 2),
        ("OPEN", "state_transition_closed_to_open", 3),
        ("OPEN", "call_rejected_circuit_open", 3),
        ("HALF_OPEN", "state_transition_open_to_half_open", 3),
        ("CLOSED", "state_transition_half_open_to_closed", 0),
    ]
    assert [line["latency_ms"] for line in logged] == [105.0, 105.0, 105.0, 0.0, 0.0, 18.0]
    assert [line.get("error_type") for line in logged] == ["UpstreamError"] * 3 + [None] * 3
    assert ["backoff_seconds" in line for line in logged] == [True] * 4 + [False] * 2
    assert [line.get("half_open_successes") for line in logged] == [None] * 4 + [0, None]
    assert {line["circuit_name"] for line in logged} == {"payments"}
    assert list(logged[0])[:5] == ["timestamp", "circuit_name", "state", "event", "latency_ms"]
    for line in logged:
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["timestamp"])


async def test_an_open_period_under_load_logs_the_first_rejection_and_then_a_count(
    breaker: CircuitBreaker, clock: FakeClock, lines: Lines
) -> None:
    await breaker.trip("maintenance")
    await reject(breaker, times=1000)
    clock.advance(10.0)
    await succeed(breaker)

    assert [(line["event"], line.get("rejected_calls")) for line in lines()] == [
        ("state_transition_closed_to_open", None),
        ("call_rejected_circuit_open", None),
        ("state_transition_open_to_half_open", 999),
    ]


async def test_a_half_open_period_does_not_flood_either(
    breaker: CircuitBreaker, clock: FakeClock, lines: Lines
) -> None:
    await breaker.trip("maintenance")
    clock.advance(10.0)
    hold = Hold(then="ok")
    upstream = ScriptedUpstream(hold)
    calls = [asyncio.create_task(breaker.call(upstream)) for _ in range(50)]
    await asyncio.sleep(0)
    hold.release()
    await asyncio.wait(calls)

    assert [(line["event"], line.get("rejected_calls")) for line in lines()][1:] == [
        ("state_transition_open_to_half_open", None),
        ("call_rejected_half_open_limit", None),
        ("state_transition_half_open_to_closed", 47),
    ]


async def test_each_open_period_has_its_own_count(breaker: CircuitBreaker, clock: FakeClock, lines: Lines) -> None:
    for rejections in (3, 5):
        await breaker.trip("again")
        await reject(breaker, times=rejections)
    await breaker.reset()

    counts = [line["rejected_calls"] for line in lines() if "rejected_calls" in line]
    assert counts == [2, 4]


async def test_a_healthy_circuit_logs_nothing_above_debug(breaker: CircuitBreaker, lines: Lines) -> None:
    await succeed(breaker, times=100)
    assert lines() == []


async def test_at_debug_each_success_is_a_line(breaker: CircuitBreaker, clock: FakeClock, lines: Lines) -> None:
    logging.getLogger("circuit_breaker").setLevel(logging.DEBUG)
    await breaker.call(ScriptedUpstream(Slow(0.02), clock=clock))
    assert [(line["event"], line["latency_ms"]) for line in lines()] == [("call_succeeded", 20.0)]


async def test_a_traceback_stays_on_its_line(breaker: CircuitBreaker, lines: Lines) -> None:
    def broken(event: Transition) -> None:
        raise RuntimeError("first\nsecond")

    breaker.add_listener(broken)
    await breaker.trip("maintenance")

    assert lines()[-1]["event"] == "listener_failed"
    assert "RuntimeError: first\nsecond" in lines()[-1]["exception"]


def test_another_loggers_record_is_one_json_object_too(lines: Lines) -> None:
    logging.getLogger("circuit_breaker").info("started %d\nworkers", 4)
    assert lines()[0]["event"] == "started 4\nworkers"
    assert lines()[0]["circuit_name"] == "unknown"


async def test_the_clock_is_read_once_at_admission_and_once_at_settlement() -> None:
    reads = 0

    def clock() -> float:
        nonlocal reads
        reads += 1
        return 1000.0 + reads

    breaker = CircuitBreaker("clock", clock=clock)
    for steps, expected in ((["ok"], 2), ([UpstreamError], 2), (["ok"], 2)):
        reads = 0
        await asyncio.gather(breaker.call(ScriptedUpstream(*steps)), return_exceptions=True)
        assert reads == expected

    await breaker.trip()
    reads = 0
    await reject(breaker, times=1)
    assert reads == 1  # a rejection is an admission refused
