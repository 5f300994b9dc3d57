"""The examples run."""

import subprocess
import sys

from tests.documentation import ROOT


def test_the_checkout_shows_the_customer_503_and_tells_others_of_each_order() -> None:
    result = subprocess.run(
        [sys.executable, "-W", "error", "-m", "examples.checkout"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert (result.returncode, result.stderr) == (0, "")
    assert "payment service up:    [201, 201, 201]" in result.stdout
    assert "payment service down:  [502, 502, 502, 503, 503]" in result.stdout
    assert "orders that others heard of: 3" in result.stdout
