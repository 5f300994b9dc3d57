"""An async generator under guard, for its whole life (article, Section 4.4)."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import TYPE_CHECKING, Any, ParamSpec

from circuit_breaker.states import Outcome

if TYPE_CHECKING:
    from circuit_breaker.circuit_breaker import CircuitBreaker

P = ParamSpec("P")


def guard_stream(
    breaker: CircuitBreaker, func: Callable[P, AsyncGenerator[Any, Any]]
) -> Callable[P, AsyncGenerator[Any, Any]]:
    """Wrap an async generator function: one admission, taken with the first item and settled with the end.

    What the stream raises counts whenever it comes. Closing early, and what the consumer throws in, is ignored.
    `asend`, `athrow` and `aclose` reach the inner generator, as `yield from` does for plain ones.
    """

    async def guarded(*args: P.args, **kwargs: P.kwargs) -> AsyncGenerator[Any, Any]:
        settle = await breaker.admit()
        thrown: BaseException | None = None
        try:
            stream = func(*args, **kwargs)
            item = await anext(stream)
            while True:
                try:
                    sent = yield item
                except GeneratorExit:
                    await stream.aclose()
                    raise
                except BaseException as error:
                    thrown = error
                    item = await stream.athrow(error)
                else:
                    item = await stream.asend(sent)
        except StopAsyncIteration:
            await settle(Outcome.SUCCESS, None)
        except BaseException as error:
            outcome = Outcome.IGNORED if error is thrown else breaker.judge(None, error)
            await settle(outcome, error)
            raise
        finally:
            thrown = None  # else its traceback holds this frame, and this frame holds it: a reference cycle

    return guarded
