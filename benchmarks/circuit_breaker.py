"""What the breaker costs, next to a bare call and to the breakers on PyPI that are installed.

    pip install circuitbreaker hyx aiobreaker purgatory fluxgate interlock-cb
    python -m benchmarks.circuit_breaker

All contestants take turns in every round, and each figure is the median of that round's ratios: what the machine does
meanwhile hits all of them. Exit status 1 if a figure is missed.
"""

import asyncio
import contextlib
import gc
import importlib
import logging
import platform
import statistics
import sys
import time
import tracemalloc
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

if not __package__:
    # Started as a file: this folder comes first on the path, where this file hides the package of the same name.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from circuit_breaker.circuit_breaker import CircuitBreaker
from circuit_breaker.config import CircuitBreakerConfig, CountWindow

ROUNDS, CALLS = 60, 2000

Upstream = Callable[[], Awaitable[None]]
Decorator = Callable[[Upstream], Any]


class UpstreamError(Exception):
    pass


async def healthy() -> None:
    pass


async def failing() -> None:
    raise UpstreamError


def ours() -> Decorator:
    return CircuitBreaker("benchmark")


def ours_with_a_window() -> Decorator:
    return CircuitBreaker("benchmark", CircuitBreakerConfig(window=CountWindow(size=100)))


PEERS: dict[str, tuple[str, Callable[[Any], Decorator]]] = {
    "circuitbreaker": ("circuitbreaker", lambda library: library.circuit(failure_threshold=5)),
    "hyx": ("hyx.circuitbreaker", lambda library: library.consecutive_breaker()),
    "aiobreaker": ("aiobreaker", lambda library: library.CircuitBreaker(fail_max=5)),
    "purgatory": ("purgatory", lambda library: library.AsyncCircuitBreakerFactory()("benchmark")),
    "fluxgate": ("fluxgate", lambda library: library.AsyncCircuitBreaker()),
    "interlock-cb": ("interlock", lambda library: library.CircuitBreaker(name="benchmark")),
}


def installed_peers() -> dict[str, Callable[[], Decorator]]:
    peers: dict[str, Callable[[], Decorator]] = {}
    for name, (module, make) in PEERS.items():
        try:
            library = importlib.import_module(module)
        except ImportError:
            print(f"{name}: not installed, left out")
            continue
        peers[name] = lambda library=library, make=make: make(library)  # type: ignore[misc]
    return peers


async def nanoseconds_closed(function: Upstream) -> float:
    started = time.perf_counter_ns()
    for _ in range(CALLS):
        await function()
    return (time.perf_counter_ns() - started) / CALLS


async def nanoseconds_open(function: Upstream) -> float:
    started = time.perf_counter_ns()
    for _ in range(CALLS):
        try:  # noqa: SIM105 - a context manager costs more than what is measured
            await function()
        except Exception:  # noqa: S110 - each library has its own
            pass
    return (time.perf_counter_ns() - started) / CALLS


async def opened(decorator: Decorator) -> Upstream:
    """A guarded function whose circuit is open."""
    function: Upstream = decorator(failing)
    for _ in range(1000):
        try:
            await function()
        except UpstreamError:
            continue
        except Exception:  # this library's rejection
            return function
    raise RuntimeError(f"{decorator} does not open")


async def race(
    contestants: dict[str, Upstream], measure: Callable[[Upstream], Awaitable[float]]
) -> dict[str, list[float]]:
    rounds: dict[str, list[float]] = {name: [] for name in contestants}
    gc.disable()
    for _ in range(ROUNDS):
        for name, function in contestants.items():
            rounds[name].append(await measure(function))
        gc.collect()
    gc.enable()
    return rounds


def ratio(rounds: dict[str, list[float]], name: str, base: str) -> float:
    return statistics.median(own / other for own, other in zip(rounds[name], rounds[base], strict=True))


def print_race(title: str, rounds: dict[str, list[float]], bare: str) -> None:
    print(f"\n{title:<28}{'ns a call':>12}{'x bare':>10}{'x ours':>10}")
    for name, nanoseconds in rounds.items():
        to_bare, to_ours = ratio(rounds, name, bare), ratio(rounds, name, "ours")
        print(f"{name:<28}{statistics.median(nanoseconds):>12,.0f}{to_bare:>10.2f}{to_ours:>10.2f}")


def fastest(rounds: dict[str, list[float]], peers: dict[str, Any]) -> str | None:
    return min(peers, key=lambda name: statistics.median(rounds[name]), default=None)


async def blocks_kept_by_a_million_calls() -> int:
    """How many more blocks of memory are in use after them than before."""
    breaker = CircuitBreaker("memory", CircuitBreakerConfig(window=CountWindow(size=100)))
    good, bad = breaker(healthy), breaker(failing)

    async def calls(rounds: int) -> None:
        for _ in range(rounds):
            await good()
            await good()
            for _ in range(2):
                with contextlib.suppress(UpstreamError):
                    await bad()

    await calls(1000)
    gc.collect()
    before = sys.getallocatedblocks()
    await calls(250_000)
    gc.collect()
    return sys.getallocatedblocks() - before


def bytes_a_breaker() -> float:
    config = CircuitBreakerConfig(window=CountWindow(size=100))
    names = [f"upstream-{number}" for number in range(1000)]
    tracemalloc.start()
    breakers = [CircuitBreaker(name, config) for name in names]
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return taken / len(breakers)


def cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(": ", 1)[1] for line in lines if line.startswith("model name")), platform.machine())


async def main() -> int:
    python = f"{platform.python_implementation()} {platform.python_version()}"
    print(f"{cpu()}, {platform.system()} {platform.release()}, {python}")
    logging.disable(logging.CRITICAL)
    peers = installed_peers()

    closed = await race(
        {
            "bare await": healthy,
            "ours": ours()(healthy),
            "ours, count window of 100": ours_with_a_window()(healthy),
            **{name: make()(healthy) for name, make in peers.items()},
        },
        nanoseconds_closed,
    )
    print_race("CLOSED, success", closed, "bare await")

    open_ = await race(
        {
            "bare raise": failing,
            "ours": await opened(ours()),
            **{name: await opened(make()) for name, make in peers.items()},
        },
        nanoseconds_open,
    )
    print_race("OPEN, rejection", open_, "bare raise")

    figures = [
        ("CLOSED: x the bare await", ratio(closed, "ours", "bare await"), 5.5),
        ("CLOSED with a count window: x the bare await", ratio(closed, "ours, count window of 100", "bare await"), 8.0),
        ("1,000,000 calls: blocks of memory kept", await blocks_kept_by_a_million_calls(), 100),
        ("a breaker with a window of 100: bytes", bytes_a_breaker(), 1023),
    ]
    if peer := fastest(closed, peers):
        figures.append((f"CLOSED: x the fastest peer ({peer})", ratio(closed, "ours", peer), 0.55))
    if peer := fastest(open_, peers):
        figures.append((f"OPEN: x the fastest peer ({peer})", ratio(open_, "ours", peer), 1.0))
    print(f"\n{'FIGURE':<52}{'measured':>12}{'at most':>10}")
    for what, measured, limit in figures:
        print(f"{what:<52}{measured:>12,.2f}{limit:>10,.2f}  {'ok' if measured <= limit else 'MISSED'}")
    return 0 if all(measured <= limit for _, measured, limit in figures) else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
