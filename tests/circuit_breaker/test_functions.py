"""What can be guarded, and what it looks like afterwards (article, Section 4.4)."""

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, ClassVar

import httpx
import pytest
from fastapi import Depends, FastAPI

import circuit_breaker as package
from circuit_breaker import CircuitBreaker, CircuitBreakerConfig, CircuitBreakerOpenException, circuit_breaker
from circuit_breaker.testing import FakeClock
from tests.circuit_breaker.support import OPEN, UpstreamError, fail


class CallableObject:
    async def __call__(self, amount: int) -> str:
        return f"charged {amount}"


async def charge(amount: int, *, currency: str = "EUR") -> str:
    """Charge the card."""
    return f"charged {amount} {currency}"


async def test_a_function_keeps_its_name_its_signature_and_what_it_is(breaker: CircuitBreaker) -> None:
    guarded: Any = breaker(charge)

    assert (guarded.__name__, guarded.__doc__, guarded.__module__) == ("charge", "Charge the card.", __name__)
    assert inspect.signature(guarded) == inspect.signature(charge)
    assert inspect.iscoroutinefunction(guarded)
    assert guarded.__wrapped__ is charge
    assert guarded.breaker is breaker
    assert await guarded(5, currency="USD") == "charged 5 USD"


async def test_the_decorator_works_with_and_without_parentheses() -> None:
    config = CircuitBreakerConfig(failure_threshold=7)

    @circuit_breaker
    async def bare() -> int:
        return 1

    @circuit_breaker()
    async def empty() -> int:
        return 2

    @circuit_breaker(name="payments", config=config)
    async def named() -> int:
        return 3

    functions: list[Any] = [bare, empty, named]
    assert [await function() for function in functions] == [1, 2, 3]
    assert bare.__qualname__ == functions[0].breaker.name
    assert functions[2].breaker.name == "payments"
    assert functions[2].breaker.config is config
    assert functions[0].breaker is not functions[1].breaker


class Client:
    shared: ClassVar[CircuitBreaker] = CircuitBreaker("shared")

    def __init__(self, base: str) -> None:
        self.base = base
        self.fetch_own = CircuitBreaker(f"own {base}")(self.fetch_plain)

    async def fetch_plain(self, path: str) -> str:
        if path == "down":
            raise UpstreamError
        return self.base + path

    @circuit_breaker
    async def fetch(self, path: str) -> str:
        return await self.fetch_plain(path)

    @classmethod
    @circuit_breaker
    async def of_class(cls, path: str) -> str:
        return cls.__name__ + path

    @staticmethod
    @circuit_breaker
    async def of_nobody(path: str) -> str:
        return path

    @circuit_breaker
    @classmethod
    async def upside_down_class(cls, path: str) -> str:
        return cls.__name__ + path

    @circuit_breaker
    @staticmethod
    async def upside_down_static(path: str) -> str:
        return path


async def test_methods_bind_and_all_instances_share_the_breaker() -> None:
    first, second = Client("a/"), Client("b/")
    assert (await first.fetch("x"), await second.fetch("x")) == ("a/x", "b/x")

    for _ in range(3):
        await asyncio.gather(first.fetch("down"), return_exceptions=True)
    with pytest.raises(CircuitBreakerOpenException):
        await second.fetch("x")


async def test_a_breaker_made_by_the_instance_is_its_own() -> None:
    first, second = Client("a/"), Client("b/")
    for _ in range(3):
        await asyncio.gather(first.fetch_own("down"), return_exceptions=True)

    with pytest.raises(CircuitBreakerOpenException):
        await first.fetch_own("x")
    assert await second.fetch_own("x") == "b/x"


async def test_classmethods_and_staticmethods_work_in_either_order() -> None:
    client: Any = Client("a/")
    assert await client.of_class("/x") == "Client/x"
    assert await Client.of_class("/x") == "Client/x"
    assert await client.of_nobody("x") == "x"
    assert await client.upside_down_class("/x") == "Client/x"
    assert await client.upside_down_static("x") == "x"


async def test_a_partial_is_guarded_and_the_breaker_is_named_after_its_function() -> None:
    guarded: Any = circuit_breaker(functools.partial(charge, 5))
    assert inspect.iscoroutinefunction(guarded)
    assert await guarded(currency="USD") == "charged 5 USD"
    assert guarded.breaker.name == "charge"


async def test_an_object_with_an_async_call_is_guarded() -> None:
    guarded: Any = circuit_breaker(CallableObject())
    assert inspect.iscoroutinefunction(guarded)
    assert await guarded(5) == "charged 5"
    assert guarded.breaker.name == "CallableObject"


def plain(amount: int) -> int:
    return amount


def plain_generator() -> Any:
    yield 1


@pytest.mark.parametrize("function", [plain, plain_generator, lambda: None, functools.partial(plain, 1), dict])
def test_a_plain_function_is_refused_when_decorated_and_told_what_to_do(function: Any) -> None:
    for decorate in (circuit_breaker, circuit_breaker(name="payments"), CircuitBreaker("payments")):
        with pytest.raises(TypeError, match=r"Declare it with `async def`, or await `breaker\.call"):
            decorate(function)


def test_a_name_given_without_its_keyword_is_refused() -> None:
    with pytest.raises(TypeError, match=r"keywords such as name=.*; not 'payments'"):
        circuit_breaker("payments")  # type: ignore[call-overload]


@pytest.mark.parametrize("name", ["", None, 5, charge])
def test_a_breaker_needs_a_name(name: Any) -> None:
    with pytest.raises(TypeError, match="name must be a non-empty string"):
        CircuitBreaker(name)


def test_a_config_that_is_none_is_refused() -> None:
    with pytest.raises(TypeError, match="config must be a CircuitBreakerConfig"):
        CircuitBreaker("payments", {"failure_threshold": 3})  # type: ignore[arg-type]


async def test_call_guards_one_call_and_passes_every_argument_on(breaker: CircuitBreaker) -> None:
    async def keywords(**kwargs: Any) -> dict[str, Any]:
        return kwargs

    assert await breaker.call(charge, 5, currency="USD") == "charged 5 USD"
    assert await breaker.call(keywords, func=1, self=2, config=3) == {"func": 1, "self": 2, "config": 3}


async def test_call_takes_a_plain_function_that_returns_an_awaitable(breaker: CircuitBreaker) -> None:
    later: Callable[[], Awaitable[str]] = lambda: charge(5)  # noqa: E731
    assert await breaker.call(later) == "charged 5 EUR"


async def test_a_fastapi_path_function_and_a_dependency_are_guarded() -> None:
    app = FastAPI()

    @circuit_breaker
    async def current_user(token: str) -> str:
        return f"user of {token}"

    @app.get("/items/{item_id}")
    @circuit_breaker
    async def read_item(item_id: int, user: Annotated[str, Depends(current_user)], limit: int = 10) -> Any:
        return {"item_id": item_id, "user": user, "limit": limit}

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://app") as client:
        response = await client.get("/items/7", params={"token": "t"})
        assert response.json() == {"item_id": 7, "user": "user of t", "limit": 10}
        assert (await client.get("/items/seven", params={"token": "t"})).status_code == 422


def test_the_package_gives_the_decorator_under_the_name_of_the_module() -> None:
    from circuit_breaker.circuit_breaker import CircuitBreaker as FromModule
    from circuit_breaker.circuit_breaker import CircuitState, JsonStructuredFormatter

    assert callable(package.circuit_breaker)
    assert FromModule is package.CircuitBreaker
    assert package.CircuitState is CircuitState
    assert package.JsonStructuredFormatter is JsonStructuredFormatter
    for name in package.__all__:
        assert getattr(package, name) is not None


async def test_the_repr_says_how_it_is(breaker: CircuitBreaker, clock: FakeClock) -> None:
    await fail(breaker, times=3)
    assert repr(breaker) == "<CircuitBreaker 'payments' OPEN generation 1>"
    assert breaker.state == OPEN
