"""How a step that must not stop half-way is awaited.

A cancelled task does not stop the thread, or the server, that works for it: whoever leaves at once leaves that work
running for nobody. Both helpers stay until the end and raise the cancellation then.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def ended(future: asyncio.Future[Any]) -> None:
    """Return when `future` is done; a cancellation that arrives meanwhile, even twice, is raised afterwards."""
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled


async def run_to_end(step: Coroutine[Any, Any, T]) -> T:
    """Run `step` to its end and return its result; a cancellation that arrives meanwhile is raised afterwards."""
    task = asyncio.get_running_loop().create_task(step)
    try:
        await ended(task)
    except asyncio.CancelledError:
        if not task.cancelled():
            task.exception()  # seen: the cancellation is what the caller gets
        raise
    return task.result()
