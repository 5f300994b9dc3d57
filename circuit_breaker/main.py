"""The life of a circuit in five phases, over real HTTP (article, Section 6).

Start it in any of these ways; the exit status is 0 only if everything in the closing table held.

    python -m circuit_breaker.main        python circuit_breaker/main.py        cd circuit_breaker && python main.py
"""

import sys
from pathlib import Path

if not __package__:
    # Started as a file: this folder comes first on the path, where circuit_breaker.py hides the package of that name.
    folder = Path(__file__).resolve().parent
    sys.path[:] = [str(folder.parent), *(entry for entry in sys.path if Path(entry).resolve() != folder)]

import asyncio
import logging
import statistics
import time

import httpx

from circuit_breaker.circuit_breaker import CircuitBreaker
from circuit_breaker.config import CircuitBreakerConfig
from circuit_breaker.exceptions import CircuitBreakerOpenException
from circuit_breaker.httpx_transport import httpx_outcome
from circuit_breaker.mock_service import MockService, Mode, create_app, serve
from circuit_breaker.states import CircuitState
from circuit_breaker.telemetry import JsonStructuredFormatter

CONFIG = CircuitBreakerConfig(failure_threshold=3, recovery_time_seconds=0.5, half_open_max_calls=2)


class Demo:
    """One breaker, one client, one upstream; each phase picks up where the one before it left them."""

    def __init__(self, service: MockService, client: httpx.AsyncClient) -> None:
        self.service = service
        self.client = client
        self.breaker = CircuitBreaker("payments_upstream_circuit", CONFIG, classify=httpx_outcome)
        self.checks: list[tuple[str, str, str]] = []

    async def charge(self) -> int:
        return (await self.breaker.call(self.client.post, "/charge")).status_code

    async def attempt(self) -> tuple[int | None, float]:
        """The status (None: rejected) and how long it took, in milliseconds."""
        started = time.perf_counter()
        try:
            status: int | None = await self.charge()
        except CircuitBreakerOpenException:
            status = None
        return status, (time.perf_counter() - started) * 1000

    def check(self, what: str, expected: object, found: object) -> None:
        self.checks.append((what, str(expected), str(found)))

    async def phase_1_healthy(self) -> None:
        heading("PHASE 1: HEALTHY (CLOSED)")
        self.service.behaviour.latency_seconds = 0.018
        statuses = [(await self.attempt())[0] for _ in range(5)]
        print(f"5 calls answered {statuses}; nothing to log.")
        self.check("1 healthy: all calls answered", [200] * 5, statuses)
        self.check("1 healthy: state", CircuitState.CLOSED, self.breaker.state)

    async def phase_2_outage(self) -> None:
        heading("PHASE 2: OUTAGE (CLOSED -> OPEN)")
        self.service.behaviour.mode = Mode.FAIL
        self.service.behaviour.latency_seconds = 0.105
        attempts = [await self.attempt() for _ in range(CONFIG.failure_threshold)]
        self.upstream_ms = statistics.median(milliseconds for _, milliseconds in attempts)
        self.check("2 outage: failures until the trip", [503] * 3, [status for status, _ in attempts])
        self.check("2 outage: state", CircuitState.OPEN, self.breaker.state)

    async def phase_3_fail_fast(self) -> None:
        heading("PHASE 3: FAIL FAST (OPEN)")
        requests_before = self.service.requests
        attempts = [await self.attempt() for _ in range(100)]
        rejection_ms = statistics.median(milliseconds for _, milliseconds in attempts)
        ratio = self.upstream_ms / rejection_ms
        print(f"failing upstream {self.upstream_ms:.1f} ms, rejection {rejection_ms:.4f} ms: {ratio:,.0f} times faster")
        self.check("3 fail fast: calls rejected", 100, sum(status is None for status, _ in attempts))
        self.check("3 fail fast: requests that reached the upstream", 0, self.service.requests - requests_before)
        self.check("3 fail fast: at least 100 times faster", True, ratio >= 100)

    async def phase_4_race(self) -> None:
        heading("PHASE 4: 50 COROUTINES RACE FOR 2 PROBES (HALF_OPEN)")
        self.service.behaviour.mode = Mode.OK
        self.service.behaviour.latency_seconds = 0.03
        requests_before = self.service.requests
        await asyncio.sleep(self.breaker.snapshot().remaining_seconds)
        attempts = await asyncio.gather(*(self.attempt() for _ in range(50)))
        self.check("4 race: probes that reached the upstream", 2, self.service.requests - requests_before)
        self.check("4 race: callers answered", 2, sum(status == 200 for status, _ in attempts))
        self.check("4 race: callers rejected", 48, sum(status is None for status, _ in attempts))

    async def phase_5_recovery(self) -> None:
        heading("PHASE 5: RECOVERY (CLOSED)")
        statuses = [(await self.attempt())[0] for _ in range(5)]
        print(f"5 calls answered {statuses}.")
        self.check("5 recovery: state", CircuitState.CLOSED, self.breaker.state)
        self.check("5 recovery: all calls answered", [200] * 5, statuses)
        self.check("5 recovery: failures on record", 0, self.breaker.snapshot().consecutive_failures)


async def run() -> bool:
    """Play the five phases and print the table. True if everything held."""
    service = MockService()
    async with serve(create_app(service)) as url, httpx.AsyncClient(base_url=url, trust_env=False) as client:
        demo = Demo(service, client)
        await demo.phase_1_healthy()
        await demo.phase_2_outage()
        await demo.phase_3_fail_fast()
        await demo.phase_4_race()
        await demo.phase_5_recovery()
    return print_table(demo.checks)


def heading(text: str) -> None:
    print(f"\n=== {text} ===", flush=True)


def print_table(checks: list[tuple[str, str, str]]) -> bool:
    """Print what was checked; True if all of it held."""
    heading("WHAT WAS CHECKED")
    for what, expected, found in checks:
        verdict = "ok" if expected == found else f"FAILED, expected {expected}"
        print(f"{what:<52} {found:<28} {verdict}")
    return all(expected == found for _, expected, found in checks)


def main() -> int:
    """The exit status: 0 if everything held, 1 if not, 130 when interrupted."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(JsonStructuredFormatter())
    logger = logging.getLogger("circuit_breaker")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        return 0 if asyncio.run(run()) else 1
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
