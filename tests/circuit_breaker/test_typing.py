"""Decorating keeps every type, and both type checkers agree on it."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_a_type_checker_sees_what_it_should_and_finds_every_mistake(checker: str) -> None:
    if importlib.util.find_spec(checker) is None:
        pytest.skip(f"{checker} is not installed: it comes with requirements-check.txt")
    result = subprocess.run(
        [sys.executable, "-m", checker, "tests/circuit_breaker/typing_cases.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
