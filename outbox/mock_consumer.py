"""A webhook consumer that runs each side effect once, however often the event is delivered.

Article: Section 4.4 (idempotent consumer). A mock in that its side effect is only counted; the idempotency is real.
"""

import asyncio
import hashlib
import logging
import os
import re
import socket
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from typing import Literal

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect

from outbox.cancellation import ended

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 1_048_576
IDEMPOTENCY_KEY = re.compile(r'(")?([\x21\x23-\x7e]{1,255})(?(1)")')
SHUTDOWN_SECONDS = 2

SideEffect = Callable[[bytes], Awaitable[object]]


class KeyReusedError(ValueError):
    """The idempotency key was used before, with another payload."""


class InMemoryIdempotencyStore:
    """Remembers the last `max_keys` idempotency keys whose side effect succeeded (Section 4.4).

    `side_effects_count` counts side effects, `delivery_hits` accepted deliveries, first ones and duplicates. A
    duplicate that comes after `max_keys` newer keys runs its side effect again: a real consumer keeps the keys in the
    database that the side effect writes to, in the same transaction.
    """

    def __init__(self, *, side_effect: SideEffect | None = None, max_keys: int = 100_000) -> None:
        if max_keys < 1:
            raise ValueError(f"max_keys must be at least 1, it is {max_keys}")
        self.side_effects_count = 0
        self.delivery_hits = 0
        self._side_effect = side_effect
        self._max_keys = max_keys
        self._fingerprints: OrderedDict[str, bytes] = OrderedDict()
        self._under_way: dict[str, asyncio.Event] = {}

    async def process(self, key: str, payload: bytes) -> Literal["processed", "duplicate"]:
        """Run the side effect unless this key has succeeded before; duplicates meanwhile wait for the first.

        Raises `KeyReusedError` for a known key with another payload, and whatever the side effect raises; then the
        key is not recorded, and the next delivery tries again.
        """
        fingerprint = hashlib.sha256(payload).digest()
        while (first := self._under_way.get(key)) is not None:
            await first.wait()
        if key in self._fingerprints:
            if self._fingerprints[key] != fingerprint:
                raise KeyReusedError(key)
            self.delivery_hits += 1
            return "duplicate"

        # From the look at the key to here nothing awaits, so no second delivery of it can be where this one is.
        self._under_way[key] = asyncio.Event()
        try:
            if self._side_effect is not None:
                await self._side_effect(payload)
            # After the side effect: a key recorded before it would turn a failure into a duplicate, and lose the event.
            self._fingerprints[key] = fingerprint
            self.side_effects_count += 1
            self.delivery_hits += 1
        finally:
            self._under_way.pop(key).set()
        if len(self._fingerprints) > self._max_keys:
            self._fingerprints.popitem(last=False)
        return "processed"


def create_app(store: InMemoryIdempotencyStore | None = None) -> FastAPI:
    """Return the consumer: `POST /webhooks` with an `Idempotency-Key` header (Section 4.4).

    200 for a first delivery and for a duplicate; 400 without a usable key; 413 for a body over 1 MiB; 422 for a known
    key with another payload; 500 when the side effect raises, and always with `?simulate_failure=true`. The key may
    stand in double quotes, as the IETF draft for this header has it.
    """
    idempotency_store = InMemoryIdempotencyStore() if store is None else store
    app = FastAPI(title="Webhook consumer")

    @app.post("/webhooks")
    async def receive(  # pyright: ignore[reportUnusedFunction]
        request: Request, simulate_failure: bool = False
    ) -> JSONResponse:
        if simulate_failure:
            return JSONResponse({"detail": "simulated failure"}, 500)
        # Two of them are joined as in RFC 9110, and are no key.
        header = IDEMPOTENCY_KEY.fullmatch(", ".join(request.headers.getlist("Idempotency-Key")))
        if header is None:
            return JSONResponse({"detail": "the Idempotency-Key header must have 1 to 255 visible characters"}, 400)
        key = header[2]
        body = bytearray()
        too_large = JSONResponse({"detail": f"the body is larger than {MAX_BODY_BYTES} bytes"}, 413)
        if int(request.headers.get("Content-Length", 0)) > MAX_BODY_BYTES:
            return too_large
        try:
            async for chunk in request.stream():
                body += chunk
                if len(body) > MAX_BODY_BYTES:
                    return too_large
        except ClientDisconnect:
            return JSONResponse({"detail": "the body is incomplete"}, 400)
        try:
            result = await idempotency_store.process(key, bytes(body))
        except KeyReusedError:
            return JSONResponse({"detail": "this Idempotency-Key was used with another payload"}, 422)
        except Exception as error:
            logger.error(
                "The side effect failed; the key is not recorded, so a redelivery tries again.",
                extra={"idempotency_key": key, "error": f"{type(error).__name__}: {error}"},
            )
            return JSONResponse({"detail": "the side effect failed"}, 500)
        if result == "processed":
            logger.info(
                "Webhook processed for the first time.",
                extra={"idempotency_key": key, "side_effects_count": idempotency_store.side_effects_count},
            )
        else:
            logger.info(
                "Duplicate recognised by its Idempotency-Key; answering 200 without a second side effect.",
                extra={"idempotency_key": key, "delivery_hits": idempotency_store.delivery_hits},
            )
        return JSONResponse({"status": result})

    return app


class _Server(uvicorn.Server):
    """A server that leaves Ctrl-C and SIGTERM to the program around it."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


@asynccontextmanager
async def serve(app: FastAPI, port: int = 0) -> AsyncGenerator[str, None]:
    """Serve `app` on the loopback interface for as long as the block lasts, and give the block its URL.

    Port 0 is a free port of the system's choice. Raises `OSError` when the port is taken.
    """
    # With the protocol named, asyncio turns Nagle's algorithm off; without, half an answer can wait 40 ms.
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        if os.name == "posix":  # elsewhere this option lets two programs share a port
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(512)
        server = _Server(
            uvicorn.Config(
                app, lifespan="off", log_config=None, access_log=False, timeout_graceful_shutdown=SHUTDOWN_SECONDS
            )
        )
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await ended(serving)
