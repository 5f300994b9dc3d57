"""The HTTP client that the dispatcher makes for itself: httpx, arranged for many requests at a time."""

import ssl
from collections.abc import AsyncGenerator, Callable
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import cast

import httpx

# Below the 5 seconds after which uvicorn, for one, closes an idle connection: a request sent into a connection that is
# just being closed is a failed attempt.
IDLE_CONNECTION_SECONDS = 2.0


def create_client() -> httpx.AsyncClient:
    """Return a client for the deliveries of one dispatcher. It keeps no cookies and reads no proxy settings."""
    no_cookies = CookieJar(DefaultCookiePolicy(allowed_domains=[]))
    return httpx.AsyncClient(transport=_OnePoolPerRequest(), cookies=no_cookies, trust_env=False)


class _OnePoolPerRequest(httpx.AsyncBaseTransport):
    """Gives each request that is under way a connection pool of its own, of one connection.

    A pool of httpx looks at every one of its connections for every request: with all deliveries on one pool, more of
    them at a time make each of them slower.
    """

    def __init__(self) -> None:
        self._ssl_context: ssl.SSLContext = httpx.create_ssl_context()
        self._limits = httpx.Limits(max_connections=1, keepalive_expiry=IDLE_CONNECTION_SECONDS)
        self._idle: list[httpx.AsyncHTTPTransport] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        pool = self._idle.pop() if self._idle else self._new_pool()
        try:
            response = await pool.handle_async_request(request)
        except BaseException:
            self._idle.append(pool)
            raise
        response.stream = _Body(cast(httpx.AsyncByteStream, response.stream), lambda: self._idle.append(pool))
        return response

    def _new_pool(self) -> httpx.AsyncHTTPTransport:
        return httpx.AsyncHTTPTransport(verify=self._ssl_context, limits=self._limits)

    async def aclose(self) -> None:
        while self._idle:
            await self._idle.pop().aclose()


class _Body(httpx.AsyncByteStream):
    """A response's body that says when it is closed."""

    def __init__(self, stream: httpx.AsyncByteStream, on_close: Callable[[], None]) -> None:
        self._stream = stream
        self._on_close = on_close

    async def __aiter__(self) -> AsyncGenerator[bytes, None]:
        async for chunk in self._stream:
            yield chunk

    async def aclose(self) -> None:
        try:
            await self._stream.aclose()
        finally:
            self._on_close()
