"""An open circuit becomes a 503 with Retry-After."""

import httpx
import pytest
from fastapi import FastAPI

from circuit_breaker import CircuitBreaker, CircuitBreakerOpenException
from circuit_breaker.fastapi_handler import circuit_open_handler, retry_after_header
from circuit_breaker.testing import FakeClock, ScriptedUpstream


async def test_an_open_circuit_is_answered_with_503_and_the_time_to_wait(
    breaker: CircuitBreaker, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = FastAPI()
    app.add_exception_handler(CircuitBreakerOpenException, circuit_open_handler)

    @app.get("/")
    async def read() -> None:
        await breaker.call(ScriptedUpstream())

    monkeypatch.setattr("random.random", lambda: 0.5)
    await breaker.trip()
    clock.advance(7.5)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://app") as client:
        response = await client.get("/")

    assert response.status_code == 503
    assert response.headers["Retry-After"] == "3"  # 2.5 s until a probe, 0.25 s of backoff, rounded up
    assert response.json() == {"detail": "Service temporarily unavailable"}
    assert "payments" not in response.text


@pytest.mark.parametrize(
    ("remaining", "backoff", "header"), [(0.0, 0.0, "1"), (0.0, 0.2, "1"), (1.0, 0.0, "1"), (1.0, 0.1, "2")]
)
def test_retry_after_is_whole_seconds_rounded_up_and_at_least_one(
    remaining: float, backoff: float, header: str
) -> None:
    assert retry_after_header(CircuitBreakerOpenException("m", "n", remaining, backoff)) == header
