# pyright: strict, reportUnnecessaryTypeIgnoreComment=true
"""What a type checker must see; `test_typing.py` runs mypy and pyright on this file. Never executed.

An ignore comment marks a mistake that has to be found: unneeded, it is itself an error.
"""

import asyncio
import functools
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from typing import Any, Generic, TypeVar, assert_type

from circuit_breaker import CircuitBreaker, CircuitState, Outcome, Snapshot, Transition, circuit_breaker

T = TypeVar("T")
breaker = CircuitBreaker("typing")


@circuit_breaker
async def bare(amount: int, *, currency: str = "EUR") -> bytes:
    return b""


@circuit_breaker(name="named")
async def named(amount: int, *, currency: str = "EUR") -> bytes:
    return b""


@breaker
async def by_instance(amount: int, *, currency: str = "EUR") -> bytes:
    return b""


@breaker
async def stream(count: int) -> AsyncGenerator[int, str]:
    yield count


@circuit_breaker
async def iterator(count: int) -> AsyncIterator[int]:
    yield count


class Client(Generic[T]):
    def __init__(self, value: T) -> None:
        self.value = value

    @circuit_breaker
    async def fetch(self, path: str) -> T:
        return self.value

    @classmethod
    @breaker
    async def of_class(cls, path: str) -> bytes:
        return b""

    @staticmethod
    @circuit_breaker(name="static")
    async def of_nobody(path: str) -> bytes:
        return b""


async def types_are_kept(client: Client[float]) -> None:
    assert_type(await bare(5), bytes)
    assert_type(await named(5, currency="USD"), bytes)
    assert_type(await by_instance(5), bytes)
    task_food: list[Coroutine[Any, Any, bytes]] = [bare(5), by_instance(5), breaker.call(bare, 5)]
    assert_type(await asyncio.create_task(task_food[0]), bytes)
    assert_type(stream(5), AsyncGenerator[int, str])
    assert_type(await stream(5).asend("text"), int)
    assert_type(iterator(5), AsyncIterator[int])
    assert_type(await client.fetch("/"), float)
    assert_type(await Client.of_class("/"), bytes)
    assert_type(await client.of_nobody("/"), bytes)
    assert_type(await breaker(functools.partial(bare, 5))(), bytes)
    assert_type(await breaker.call(bare, 5, currency="USD"), bytes)
    async with breaker.guard() as nothing:
        assert_type(nothing, None)
    assert_type(breaker.state, CircuitState)
    assert_type(breaker.snapshot(), Snapshot)
    assert_type(breaker.judge(None, ValueError()), Outcome)


async def mistakes_are_found() -> None:
    await bare("5")  # type: ignore[arg-type]
    await bare(5, "USD")  # type: ignore[call-arg]
    await named(5, colour="red")  # type: ignore[call-arg]
    await by_instance()  # type: ignore[call-arg]
    await breaker.call(bare, "5")  # type: ignore[arg-type]
    stream("5")  # type: ignore[arg-type]
    circuit_breaker("payments")  # type: ignore[call-overload]

    def plain(amount: int) -> int:
        return amount

    breaker(plain)  # type: ignore[type-var]
    circuit_breaker(name="plain")(plain)  # type: ignore[type-var]
    circuit_breaker(plain)  # type: ignore[type-var]


def listeners_and_classifiers() -> None:
    def heard(event: Transition) -> None: ...

    def classify(result: bytes, error: Exception | None) -> Outcome:
        return Outcome.SUCCESS

    breaker.add_listener(heard)
    CircuitBreaker("classified", classify=classify)
    CircuitBreaker("classified", classify=heard)  # type: ignore[arg-type]
