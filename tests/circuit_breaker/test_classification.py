"""What counts as a failure: 5xx and silence, never the caller's own mistakes (article, Section 7)."""

import asyncio
from typing import Any

import httpx
import pytest

from circuit_breaker import CircuitBreaker, CircuitBreakerConfig, CircuitBreakerOpenException, Outcome
from circuit_breaker.httpx_transport import httpx_outcome
from circuit_breaker.testing import FakeClock, Hold, ScriptedUpstream
from tests.circuit_breaker.conftest import Log
from tests.circuit_breaker.support import CLOSED, OPEN, UpstreamError

REQUEST = httpx.Request("GET", "http://upstream.test/")


def answer(status: int) -> httpx.Response:
    return httpx.Response(status, request=REQUEST)


def raised(status: int) -> httpx.HTTPStatusError:
    return httpx.HTTPStatusError(str(status), request=REQUEST, response=answer(status))


@pytest.fixture
def http_breaker(clock: FakeClock) -> CircuitBreaker:
    return CircuitBreaker("http", CircuitBreakerConfig(), classify=httpx_outcome, clock=clock)


async def play(breaker: CircuitBreaker, *steps: Any) -> None:
    upstream = ScriptedUpstream(*steps)
    for _ in steps:
        await asyncio.gather(breaker.call(upstream), return_exceptions=True)


@pytest.mark.parametrize("form", [answer, raised], ids=["returned", "raised"])
class TestStatuses:
    async def test_500_400_500_400_500_opens_at_threshold_3(self, form: Any, http_breaker: CircuitBreaker) -> None:
        await play(http_breaker, *(form(status) for status in (500, 400, 500, 400)))
        assert http_breaker.state == CLOSED

        await play(http_breaker, form(500))
        assert http_breaker.state == OPEN

    async def test_a_hundred_404_stay_closed_and_do_not_clear_a_streak(
        self, form: Any, http_breaker: CircuitBreaker
    ) -> None:
        await play(http_breaker, form(503), form(503))
        await play(http_breaker, *[form(404)] * 100)
        assert http_breaker.state == CLOSED
        assert http_breaker.snapshot().consecutive_failures == 2

        await play(http_breaker, form(503))
        assert http_breaker.state == OPEN

    async def test_an_upstream_that_answers_only_404_after_an_outage_recovers(
        self, form: Any, http_breaker: CircuitBreaker, clock: FakeClock
    ) -> None:
        await play(http_breaker, *[form(503)] * 3)
        clock.advance(10.0)

        await play(http_breaker, form(404), form(404))

        assert http_breaker.state == CLOSED

    @pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
    async def test_the_statuses_of_a_sick_upstream_count(
        self, status: int, form: Any, http_breaker: CircuitBreaker
    ) -> None:
        await play(http_breaker, *[form(status)] * 3)
        assert http_breaker.state == OPEN

    @pytest.mark.parametrize("status", [200, 204, 301, 304, 501])
    async def test_every_other_answer_ends_a_streak(self, status: int, form: Any, http_breaker: CircuitBreaker) -> None:
        await play(http_breaker, form(503), form(503), form(status))
        assert http_breaker.snapshot().consecutive_failures == 0


@pytest.mark.parametrize(
    "error",
    [
        httpx.ConnectError("refused"),
        httpx.ConnectTimeout("slow"),
        httpx.ReadTimeout("slow"),
        httpx.WriteTimeout("slow"),
        httpx.ReadError("reset"),
        httpx.RemoteProtocolError("not HTTP"),
        httpx.ProxyError("no way through"),
        TimeoutError(),
        ConnectionResetError(),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_trouble_on_the_way_counts(error: Exception, http_breaker: CircuitBreaker) -> None:
    await play(http_breaker, *[error] * 3)
    assert http_breaker.state == OPEN


@pytest.mark.parametrize(
    "error",
    [
        httpx.PoolTimeout("all connections are busy"),
        httpx.UnsupportedProtocol("gopher"),
        httpx.LocalProtocolError("bad header"),
        httpx.InvalidURL("no host"),
        httpx.CookieConflict("two of them"),
        ValueError("a bug of the caller"),
        FileNotFoundError("a file of the caller"),
        CircuitBreakerOpenException("another circuit"),
        asyncio.CancelledError(),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_what_never_left_the_caller_has_no_effect(error: BaseException, http_breaker: CircuitBreaker) -> None:
    await play(http_breaker, answer(503), answer(503))
    before = http_breaker.snapshot()

    await play(http_breaker, *[error] * 100)

    assert http_breaker.snapshot() == before


async def test_a_cancelled_request_never_counts(http_breaker: CircuitBreaker) -> None:
    for _ in range(10):
        task: asyncio.Task[Any] = asyncio.create_task(http_breaker.call(ScriptedUpstream(Hold())))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
    assert http_breaker.snapshot().consecutive_failures == 0


async def test_an_answer_that_cannot_be_decoded_is_still_an_answer() -> None:
    assert httpx_outcome(None, httpx.DecodingError("bad gzip")) is Outcome.SUCCESS
    assert httpx_outcome(None, httpx.TooManyRedirects("round and round")) is Outcome.SUCCESS


async def test_a_callers_own_value_error_does_not_count_beside_expected_exceptions(clock: FakeClock) -> None:
    config = CircuitBreakerConfig(expected_exceptions=(httpx.HTTPError,))
    breaker = CircuitBreaker("expected", config, clock=clock)

    await play(breaker, *[ValueError("mine")] * 100)
    assert breaker.snapshot().consecutive_failures == 0

    await play(breaker, *[httpx.ReadTimeout("theirs")] * 3)
    assert breaker.state == OPEN


async def test_a_deadline_counts_inside_the_guarded_function_and_says_nothing_around_it(
    breaker: CircuitBreaker,
) -> None:
    async def in_time() -> None:
        async with asyncio.timeout(0):
            await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        await breaker.call(in_time)
    assert breaker.snapshot().consecutive_failures == 1

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await breaker.call(asyncio.Event().wait)
    assert breaker.snapshot().consecutive_failures == 1


async def test_by_default_every_exception_counts(breaker: CircuitBreaker) -> None:
    await play(breaker, ValueError(), KeyError(), UpstreamError())
    assert breaker.state == OPEN


async def test_classify_is_asked_about_results_and_expected_errors_only(clock: FakeClock) -> None:
    asked: list[tuple[object, object]] = []

    def classify(result: object, error: Exception | None) -> Outcome:
        asked.append((result, error))
        return Outcome.SUCCESS

    config = CircuitBreakerConfig(expected_exceptions=(UpstreamError,))
    breaker = CircuitBreaker("asked", config, classify=classify, clock=clock)
    expected = UpstreamError()

    await play(breaker, "result", expected, ValueError(), asyncio.CancelledError())

    assert asked == [("result", None), (None, expected)]


def broken(result: object, error: Exception | None) -> Outcome:
    raise ZeroDivisionError


def forgetful(result: object, error: Exception | None) -> Any:
    return None


@pytest.mark.parametrize("classify", [broken, forgetful], ids=["raises", "returns no outcome"])
async def test_a_classify_that_does_not_answer_makes_a_logged_failure(
    classify: Any, clock: FakeClock, events: Log
) -> None:
    breaker = CircuitBreaker("broken", CircuitBreakerConfig(half_open_max_calls=1), classify=classify, clock=clock)

    assert await breaker.call(ScriptedUpstream("result")) == "result"  # the caller gets it all the same
    await play(breaker, UpstreamError(), "result")

    assert breaker.state == OPEN
    assert events().count("classify_failed") == 3
    clock.advance(10.0)
    await play(breaker, "result")
    assert breaker.state == OPEN
    assert breaker.snapshot().probes_in_flight == 0


async def test_a_guard_asks_classify_about_errors_alone(http_breaker: CircuitBreaker) -> None:
    for _ in range(3):
        with pytest.raises(httpx.HTTPStatusError):
            async with http_breaker.guard():
                raise raised(503)
    assert http_breaker.state == OPEN


async def test_an_ignored_result_gives_its_place_back(clock: FakeClock) -> None:
    config = CircuitBreakerConfig(half_open_max_calls=1)
    breaker = CircuitBreaker("ignored", config, classify=lambda result, error: result, clock=clock)
    await breaker.trip()
    clock.advance(10.0)

    await play(breaker, Outcome.IGNORED, Outcome.IGNORED, Outcome.SUCCESS)

    assert breaker.state == CLOSED


async def test_an_async_classify_is_refused() -> None:
    async def classify(result: object, error: Exception | None) -> Outcome:
        return Outcome.SUCCESS

    with pytest.raises(TypeError, match="plain function"):
        CircuitBreaker("async", classify=classify)  # type: ignore[arg-type]
