"""An upstream that misbehaves on request: fails, dawdles, hangs, or dies half-way through its answer.

By hand:  python -m circuit_breaker.mock_service --port 8001
          curl -X PUT localhost:8001/behaviour -H 'Content-Type: application/json' -d '{"mode": "fail"}'
          curl -i localhost:8001/charge
In code:  async with serve(create_app(behaviour)) as url: ...
"""

import argparse
import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator, Generator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field
from starlette.types import Receive, Scope, Send


class Mode(StrEnum):
    """How `/charge` ends."""

    OK = "ok"
    FAIL = "fail"
    """Answers `status_code`."""
    HANG = "hang"
    """Never answers."""
    RESET = "reset"
    """Answers 200, sends half of the body, and drops the connection."""


class Behaviour(BaseModel):
    """What the upstream does to its callers. Latency in seconds, before anything else happens."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True, allow_inf_nan=False)

    mode: Mode = Mode.OK
    status_code: int = Field(default=503, ge=400, le=599)
    latency_seconds: float = Field(default=0.0, ge=0.0)


@dataclass
class MockService:
    """The switch and the counter behind one app; tests and the demo hold it, others use `PUT /behaviour`."""

    behaviour: Behaviour = field(default_factory=Behaviour)
    requests: int = 0

    async def charge(self, request: Request) -> Response:
        """Answer as `behaviour` says at the moment when the request arrives."""
        self.requests += 1
        behaviour = self.behaviour.model_copy()
        hangs = behaviour.mode is Mode.HANG
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None if hangs else behaviour.latency_seconds):
                while (await request.receive())["type"] != "http.disconnect":
                    pass  # A caller who leaves must not keep the server from stopping.
        if behaviour.mode is Mode.FAIL:
            return JSONResponse({"detail": "injected failure"}, status_code=behaviour.status_code)
        if behaviour.mode is Mode.RESET:
            return _HalfAResponse()
        return JSONResponse({"status": "charged"})


class _HalfAResponse(Response):
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
        await send({"type": "http.response.body", "body": b"half of the ans", "more_body": True})
        # Returning without the rest makes the server drop the connection.


def create_app(service: MockService | None = None) -> FastAPI:
    """`GET` and `POST /charge`, `GET` and `PUT /behaviour`, `GET /requests` (how many `/charge` has seen)."""
    service = service or MockService()
    app = FastAPI(title="Mock upstream")
    app.add_api_route("/charge", service.charge, methods=["GET", "POST"], response_model=None)

    @app.get("/behaviour")
    async def read_behaviour() -> Behaviour:
        return service.behaviour

    @app.put("/behaviour")
    async def switch_behaviour(behaviour: Behaviour) -> Behaviour:
        service.behaviour = behaviour
        return behaviour

    @app.get("/requests")
    async def count_requests() -> dict[str, int]:
        return {"requests": service.requests}

    return app


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield  # Ctrl-C belongs to the program around the server.


@contextlib.asynccontextmanager
async def serve(app: Any) -> AsyncGenerator[str, None]:
    """Serve an ASGI app on a free port of the loopback interface; yields its base URL."""
    # With the protocol named, asyncio turns Nagle's algorithm off; without, each answer may wait 40 ms.
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(512)  # Connections wait here from now on: nobody has to poll for the server's start.
        config = uvicorn.Config(app, log_level="critical", lifespan="off", timeout_graceful_shutdown=1)
        server = _Server(config)
        running = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await running


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port (0 to 65535; 0 is any free one)")
    return int(text)


def main() -> None:
    """Serve the mock upstream until interrupted."""
    parser = argparse.ArgumentParser(prog="python -m circuit_breaker.mock_service", description="A mock upstream.")
    parser.add_argument("--port", type=_port, default=8001, help="port on 127.0.0.1 (default: %(default)s)")
    port: int = parser.parse_args().port
    uvicorn.run(create_app(), host="127.0.0.1", port=port, timeout_graceful_shutdown=1)


if __name__ == "__main__":
    main()
