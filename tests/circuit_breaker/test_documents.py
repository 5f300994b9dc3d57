"""What the documents show is what the code does."""

import itertools
import json
import re
import shutil
import socket
import subprocess
import sys

import pytest

from tests.circuit_breaker.support import ROOT, run_in_shell
from tests.circuit_breaker.test_demo import COMMANDS, LOGGED
from tests.documentation import blocks, is_cut_from, read

README, ARTICLE = "circuit_breaker/README.md", "circuit_breaker/ARTICLE.md"


@pytest.mark.parametrize("number", range(len(blocks(README, "python"))))
def test_every_example_in_the_readme_runs_as_it_stands(number: int) -> None:
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", blocks(README, "python")[number]],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stderr


def test_the_quickstart_prints_what_it_says() -> None:
    script = blocks(README, "python")[0]
    result = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    lines = result.stdout.splitlines()
    assert lines[:3] == ["tried: the payment service is down"] * 3
    assert re.fullmatch(r"not even tried: circuit 'payments' is OPEN, retry in \d+\.\d\d s", lines[3])


def test_the_readme_starts_the_demo_as_the_tests_do() -> None:
    assert blocks(README, "sh")[0].splitlines() == COMMANDS


def test_the_mock_upstream_by_hand_as_in_the_readme() -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = blocks(README, "sh")[1]
    result = run_in_shell(script.replace("localhost", "127.0.0.1").replace("8001", str(port)))
    assert result.returncode == 0, result.stderr
    assert '{"status":"charged"}' in result.stdout
    assert "HTTP/1.1 503" in result.stdout


def test_the_benchmark_as_in_the_readme_prints_every_figure() -> None:
    result = run_in_shell(blocks(README, "sh")[2])
    # Its time figures depend on what else the machine does; that they are printed does not.
    assert result.returncode in (0, 1), result.stderr
    assert re.search(r"CLOSED: x the bare await +\d+\.\d\d +5\.50", result.stdout)
    for figure in ("1,000,000 calls: blocks of memory kept", "a breaker with a window of 100: bytes"):
        assert re.search(rf"{figure} .* ok$", result.stdout, re.MULTILINE), result.stdout


def test_no_command_in_the_readme_is_left_untested() -> None:
    assert len(blocks(README, "sh")) == 3
    assert blocks(ARTICLE, "sh") == []


@pytest.mark.parametrize("listing", blocks(ARTICLE, "python"), ids=lambda listing: listing.splitlines()[0][:40])
def test_every_listing_in_the_article_is_cut_from_the_source(listing: str) -> None:
    assert is_cut_from(["circuit_breaker", "tests/circuit_breaker"], listing)


def test_the_telemetry_in_the_article_is_what_the_demo_logs() -> None:
    (sample,) = blocks(ARTICLE, "json")
    lines = [json.loads(line) for line in sample.splitlines()]
    assert [(line["state"], line["event"]) for line in lines] == LOGGED


@pytest.mark.parametrize("document", [README, ARTICLE])
def test_every_link_leads_somewhere(document: str) -> None:
    text = read(document)
    anchors = {
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    }
    for target in itertools.chain(re.findall(r"\]\((?!https?:)([^)]+)\)", text)):
        if target.startswith("#"):
            assert target[1:] in anchors, target
        else:
            assert (ROOT / document).parent.joinpath(target).exists(), target
