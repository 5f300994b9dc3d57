"""Every request of an httpx client under guard, one breaker for each host and port (article, Section 7).

    client = httpx.AsyncClient(transport=CircuitBreakerTransport(config=CircuitBreakerConfig()))

A call is the request and its whole response: an upstream that answers 200 and then dies half-way through the body has
failed.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import httpx

from circuit_breaker.circuit_breaker import CircuitBreaker, Settle
from circuit_breaker.config import CircuitBreakerConfig
from circuit_breaker.states import Outcome

FAILURE_STATUSES = frozenset({408, 429, 500, 502, 503, 504})
NEVER_LEFT_THE_CALLER = (httpx.PoolTimeout, httpx.UnsupportedProtocol, httpx.LocalProtocolError)
DEFAULT_PORTS = {"http": 80, "https": 443}


def httpx_outcome(result: object, error: BaseException | None) -> Outcome:
    """A `classify` for functions that use httpx, whether they return the response or call `raise_for_status()`.

    FAILURE: 408, 429, 500, 502, 503, 504, and errors on the way there and back, timeouts of any kind included.
    ALIVE: any other 4xx. IGNORED: what never left the caller (no free connection in the pool, an impossible URL or
    request) and errors that are not about HTTP. SUCCESS: the rest.
    """
    if isinstance(error, httpx.HTTPStatusError):
        result = error.response
    if isinstance(result, httpx.Response):
        if result.status_code in FAILURE_STATUSES:
            return Outcome.FAILURE
        return Outcome.ALIVE if result.is_client_error else Outcome.SUCCESS
    if isinstance(error, NEVER_LEFT_THE_CALLER):
        return Outcome.IGNORED
    # A TimeoutError is how a request under `asyncio.timeout` ends.
    if isinstance(error, httpx.TransportError | TimeoutError | ConnectionError):
        return Outcome.FAILURE
    if error is None or isinstance(error, httpx.RequestError):
        return Outcome.SUCCESS
    return Outcome.IGNORED


class CircuitBreakerTransport(httpx.AsyncBaseTransport):
    """Wraps another transport (default: `httpx.AsyncHTTPTransport()`).

    Requests to a host and port whose circuit is open raise CircuitBreakerOpenException. At most `max_breakers` are
    kept; the one used least recently goes first, but never one that is not CLOSED or has failures on record. When all
    of them have, a further host is served unguarded. The other arguments are those of `CircuitBreaker`.
    """

    def __init__(
        self,
        transport: httpx.AsyncBaseTransport | None = None,
        *,
        config: CircuitBreakerConfig | None = None,
        classify: Callable[[Any, Exception | None], Outcome] = httpx_outcome,
        clock: Callable[[], float] = time.monotonic,
        max_breakers: int = 1000,
    ) -> None:
        if max_breakers < 1:
            raise ValueError(f"max_breakers ({max_breakers}) must be at least 1")
        self._transport = transport or httpx.AsyncHTTPTransport()
        self._config = config or CircuitBreakerConfig()
        self._classify = classify
        self._clock = clock
        self._max_breakers = max_breakers
        self._breakers: dict[str, CircuitBreaker] = {}  # least recently used first

    def breaker_for(self, url: httpx.URL | str) -> CircuitBreaker:
        """The breaker of the URL's host and port, a new one if there is none. Its name is `host:port`."""
        url = httpx.URL(url)
        host = f"[{url.host}]" if ":" in url.host else url.host
        name = f"{host}:{url.port or DEFAULT_PORTS.get(url.scheme)}"
        breaker = self._breakers.pop(name, None)
        if breaker is None:
            breaker = CircuitBreaker(name, self._config, classify=self._classify, clock=self._clock)
            if len(self._breakers) >= self._max_breakers and not self._drop_one():
                return breaker
        self._breakers[name] = breaker
        return breaker

    def _drop_one(self) -> bool:
        name = next((name for name, breaker in self._breakers.items() if breaker.has_clean_record), None)
        if name is not None:
            del self._breakers[name]
        return name is not None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send the request. Raises CircuitBreakerOpenException, and whatever the wrapped transport raises."""
        breaker = self.breaker_for(request.url)
        settle = await breaker.admit()
        try:
            response = await self._transport.handle_async_request(request)
            body = _GuardedBody(response, breaker, settle)
        except BaseException as error:
            await settle(breaker.judge(None, error), error)
            raise
        return httpx.Response(
            response.status_code, headers=response.headers, stream=body, extensions=response.extensions
        )

    async def aclose(self) -> None:
        """Close the wrapped transport."""
        await self._transport.aclose()


class _GuardedBody(httpx.AsyncByteStream):
    """Settles the call when its body ends: as its status said, or as a failure of the stream says."""

    def __init__(self, response: httpx.Response, breaker: CircuitBreaker, settle: Settle) -> None:
        self._body = cast("httpx.AsyncByteStream", response.stream)
        self._outcome = breaker.judge(response, None)
        self._breaker = breaker
        self._settle: Settle | None = settle

    async def _settle_once(self, outcome: Outcome, error: BaseException | None = None) -> None:
        settle, self._settle = self._settle, None
        if settle is not None:
            await settle(outcome, error)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for chunk in self._body:
                yield chunk
        except (Exception, asyncio.CancelledError) as error:  # a reader who has seen enough only closes
            await self._settle_once(self._breaker.judge(None, error), error)
            raise

    async def aclose(self) -> None:
        # httpx calls this at the end of the body, too. Before the connection is closed: that may take its time.
        await self._settle_once(self._outcome)
        await self._body.aclose()
