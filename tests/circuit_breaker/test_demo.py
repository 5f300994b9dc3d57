"""The demo runs however a reader starts it, and its exit status can be trusted."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from circuit_breaker.main import print_table
from tests.circuit_breaker.support import ROOT, run_in_shell

COMMANDS = [
    "python circuit_breaker/main.py",
    "python -m circuit_breaker.main",
    "cd circuit_breaker && python main.py",
]
LOGGED = [
    ("CLOSED", "call_failed"),
    ("CLOSED", "call_failed"),
    ("OPEN", "state_transition_closed_to_open"),
    ("OPEN", "call_rejected_circuit_open"),
    ("HALF_OPEN", "state_transition_open_to_half_open"),
    ("HALF_OPEN", "call_rejected_half_open_limit"),
    ("CLOSED", "state_transition_half_open_to_closed"),
]


@pytest.mark.parametrize("command", [*COMMANDS, f"cd / && python {ROOT}/circuit_breaker/main.py"])
def test_the_demo_runs_and_everything_it_checks_holds(command: str) -> None:
    result = run_in_shell(command)

    assert (result.returncode, result.stderr) == (0, "")
    for number in range(1, 6):
        assert f"=== PHASE {number}: " in result.stdout
    lines = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    assert [(line["state"], line["event"]) for line in lines] == LOGGED
    assert [line["rejected_calls"] for line in lines if "rejected_calls" in line] == [99, 47]
    table = result.stdout.split("=== WHAT WAS CHECKED ===")[1]
    assert table.count(" ok\n") == 13
    assert "FAILED" not in table


def test_the_table_fails_if_one_check_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert print_table([("probes", "2", "2")])
    assert not print_table([("probes", "2", "2"), ("rejected", "48", "47")])
    assert "FAILED, expected 48" in capsys.readouterr().out


def test_a_breaker_that_lets_a_third_probe_through_makes_the_demo_fail(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "circuit_breaker", tmp_path / "circuit_breaker")
    core = tmp_path / "circuit_breaker" / "circuit_breaker.py"
    source = core.read_text()
    assert source.count("places_taken >= ") == 1
    core.write_text(source.replace("places_taken >= ", "places_taken > "))

    result = subprocess.run(
        [sys.executable, "circuit_breaker/main.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )

    assert result.returncode == 1
    assert "FAILED, expected 48" in result.stdout


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGINT to send to another process")
def test_ctrl_c_ends_the_demo_without_a_traceback() -> None:
    with subprocess.Popen(
        [sys.executable, "circuit_breaker/main.py"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    ) as process:
        assert process.stdout is not None
        while "PHASE 2" not in process.stdout.readline():
            pass
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)

    assert process.returncode == 130
    assert errors.strip() == "interrupted"
