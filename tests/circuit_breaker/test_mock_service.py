"""The mock upstream does what it is switched to, for tests, for the demo, and by hand."""

import asyncio
import re
import subprocess
import sys
from collections.abc import AsyncIterator

import httpx
import pytest
from pydantic import ValidationError

from circuit_breaker.mock_service import Behaviour, MockService, Mode, create_app, serve


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with serve(create_app()) as url, httpx.AsyncClient(base_url=url) as client:
        yield client


async def test_it_is_switched_over_http(client: httpx.AsyncClient) -> None:
    assert (await client.get("/charge")).json() == {"status": "charged"}
    await client.put("/behaviour", json={"mode": "fail", "status_code": 429})
    assert (await client.post("/charge")).status_code == 429
    assert (await client.get("/behaviour")).json() == {"mode": "fail", "status_code": 429, "latency_seconds": 0.0}
    await client.put("/behaviour", json={"mode": "ok"})
    assert (await client.get("/charge")).status_code == 200
    assert (await client.get("/requests")).json() == {"requests": 3}


@pytest.mark.parametrize(
    ("behaviour", "field"),
    [
        ({"mode": "explode"}, "mode"),
        ({"status_code": 200}, "status_code"),
        ({"latency_seconds": -1}, "latency_seconds"),
        ({"latency": 1}, "latency"),
    ],
)
async def test_a_bad_behaviour_is_refused_and_the_field_is_named(
    behaviour: dict[str, object], field: str, client: httpx.AsyncClient
) -> None:
    response = await client.put("/behaviour", json=behaviour)
    assert response.status_code == 422
    assert response.json()["detail"][0]["loc"] == ["body", field]


def test_a_bad_behaviour_is_refused_in_code_too() -> None:
    with pytest.raises(ValidationError, match="status_code"):
        MockService().behaviour.status_code = 20


async def test_latency_comes_before_everything_else(client: httpx.AsyncClient) -> None:
    await client.put("/behaviour", json={"mode": "fail", "latency_seconds": 30.0})
    with pytest.raises(httpx.ReadTimeout):
        await client.get("/charge", timeout=httpx.Timeout(30.0, read=0.05))


async def test_reset_drops_the_connection_in_the_middle_of_the_body(client: httpx.AsyncClient) -> None:
    await client.put("/behaviour", json={"mode": "reset"})
    async with client.stream("GET", "/charge") as response:
        assert response.status_code == 200
        with pytest.raises(httpx.RemoteProtocolError):
            await response.aread()


async def test_a_hung_request_ends_when_its_caller_leaves() -> None:
    service = MockService(Behaviour(mode=Mode.HANG))
    async with asyncio.timeout(10), serve(create_app(service)) as url, httpx.AsyncClient(base_url=url) as client:
        with pytest.raises(httpx.ReadTimeout):
            await client.get("/charge", timeout=httpx.Timeout(30.0, read=0.05))
        # Leaving stops the server, which waits for requests that are still running.


def test_by_hand_it_serves_on_the_port_it_is_given() -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "circuit_breaker.mock_service", "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if running := re.search(r"running on (http://127\.0\.0\.1:\d+)", line):
                break
        else:
            pytest.fail("it said nowhere where it serves")
        assert httpx.get(f"{running[1]}/charge").json() == {"status": "charged"}
        process.terminate()


def test_a_port_that_is_none_is_refused() -> None:
    for port in ("eighty", "70000", "-1"):
        result = subprocess.run(
            [sys.executable, "-m", "circuit_breaker.mock_service", "--port", port],
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 2
        assert f"argument --port: '{port}' is not a port" in result.stderr
