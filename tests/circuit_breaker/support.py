"""Words and steps that many tests share."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from circuit_breaker import CircuitBreaker, CircuitState
from circuit_breaker.testing import ScriptedUpstream

# Typed as the enum: mypy takes `breaker.state == CircuitState.OPEN` to hold for the rest of the test.
CLOSED: CircuitState = CircuitState.CLOSED
OPEN: CircuitState = CircuitState.OPEN
HALF_OPEN: CircuitState = CircuitState.HALF_OPEN


ROOT = Path(__file__).parents[2]


class UpstreamError(Exception):
    """What the upstream raises in these tests."""


async def fail(breaker: CircuitBreaker, times: int = 1) -> None:
    """That many calls, one after the other, which all fail."""
    for _ in range(times):
        with pytest.raises(UpstreamError):
            await breaker.call(ScriptedUpstream(UpstreamError))


async def succeed(breaker: CircuitBreaker, times: int = 1) -> None:
    """That many calls, one after the other, which all succeed."""
    for _ in range(times):
        assert await breaker.call(ScriptedUpstream("ok")) == "ok"


def run_in_shell(script: str) -> subprocess.CompletedProcess[str]:
    """Run it as a reader in the project's root would, with this interpreter as `python`."""
    if shutil.which("bash") is None:
        pytest.skip("bash is not installed")
    path = f'export PATH="{Path(sys.executable).parent}:$PATH"\n'
    return subprocess.run(
        ["bash", "-c", path + script], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
