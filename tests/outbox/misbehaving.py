"""Raw socket servers that answer as no HTTP library would let them."""

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress


class RawServer:
    """What the server saw and sent."""

    def __init__(self) -> None:
        self.url = ""
        self.connections = 0
        self.requests: list[bytes] = []
        self.bytes_sent = 0


class Exchange:
    """One request on its connection, and the raw means to answer it."""

    def __init__(self, server: RawServer, request: bytes, writer: asyncio.StreamWriter) -> None:
        self._server = server
        self._writer = writer
        self.body = request.partition(b"\r\n\r\n")[2]

    async def send(self, data: bytes) -> None:
        """Return when the system, or a small buffer before it, has taken the bytes."""
        self._writer.write(data)
        self._server.bytes_sent += len(data)
        await self._writer.drain()

    async def hang(self) -> None:
        await asyncio.Event().wait()

    def close(self) -> None:
        self._writer.close()

    def reset(self) -> None:
        """Close with RST instead of FIN."""
        connection = self._writer.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()


Script = Callable[[Exchange], Awaitable[None]]


def answering(status: str, body: bytes = b"", *headers: str) -> Script:
    """A well-behaved answer; the connection is kept."""

    async def script(exchange: Exchange) -> None:
        await exchange.send(head(status, f"Content-Length: {len(body)}", *headers) + body)

    return script


def head(status: str, *headers: str) -> bytes:
    return "".join(f"{line}\r\n" for line in (f"HTTP/1.1 {status}", *headers, "")).encode("latin-1")


class Held:
    """Keeps each request until it is let go, then answers 200."""

    def __init__(self) -> None:
        self.let_go = asyncio.Event()
        self.arrived = 0

    async def __call__(self, exchange: Exchange) -> None:
        self.arrived += 1
        await self.let_go.wait()
        await exchange.send(head("200 OK", "Content-Length: 0"))


@asynccontextmanager
async def raw_server(script: Script) -> AsyncIterator[RawServer]:
    """Serve on a free loopback port: read a request, run `script`, and so on until the connection is closed."""
    server = RawServer()
    serving: set[asyncio.Task[None]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        serving.add(task)
        server.connections += 1
        # Cancelled at the end of the block. A client that goes away is what many tests are about.
        with suppress(asyncio.CancelledError, asyncio.IncompleteReadError, ConnectionError):
            while not writer.is_closing():
                request = await _read_request(reader)
                server.requests.append(request)
                await script(Exchange(server, request, writer))
        writer.transport.abort()
        serving.discard(task)

    listener = await asyncio.start_server(connected, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}/webhooks"
    try:
        yield server
    finally:
        listener.close()
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)
        await listener.wait_closed()


async def _read_request(reader: asyncio.StreamReader) -> bytes:
    request_head = await reader.readuntil(b"\r\n\r\n")
    for line in request_head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return request_head + await reader.readexactly(int(value))
    return request_head


def header_of(request: bytes, name: str) -> str | None:
    for line in request.partition(b"\r\n\r\n")[0].decode("latin-1").split("\r\n")[1:]:
        key, _, value = line.partition(":")
        if key.lower() == name.lower():
            return value.strip()
    return None
