"""The demonstration, as a reader starts it."""

import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from outbox.database import SQLiteStore
from tests.documentation import ROOT
from tests.outbox.support import ORDER, rows

HEADINGS = ["CYCLE 1", "CYCLE 2", "CYCLE 3", "CYCLE 4", "REPLAY", "WHAT WAS CHECKED"]


def start(arguments: list[str], cwd: Path) -> subprocess.Popen[str]:
    # Without PYTHONPATH: a reader has none.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.Popen(
        [sys.executable, "-W", "error", *arguments],
        cwd=cwd,
        env=environment | {"PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(
    ("arguments", "folder"), [(["outbox/main.py"], "."), (["-m", "outbox.main"], "."), (["main.py"], "outbox")]
)
def test_the_demo_runs_in_each_way_that_a_reader_starts_it(arguments: list[str], folder: str) -> None:
    process = start(arguments, ROOT / folder)
    output, errors = process.communicate(timeout=60)

    assert (process.returncode, errors) == (0, "")
    positions = [output.find(f"=== {heading}") for heading in HEADINGS]
    assert -1 not in positions
    assert positions == sorted(positions)
    table = output[positions[-1] :].splitlines()[1:]
    assert len(table) >= 10
    assert all(line.startswith("ok ") for line in table)


def test_the_demo_keeps_its_database_where_it_is_told(tmp_path: Path) -> None:
    kept = tmp_path / "kept.db"

    for runs in (1, 2):
        process = start(["outbox/main.py", "--db", str(kept)], ROOT)
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 0, output
        assert rows(kept, "SELECT status, count(*) FROM outbox GROUP BY status") == [("PUBLISHED", 2 * runs)]


async def test_the_demo_refuses_a_database_whose_events_it_would_take_away(db_path: Path) -> None:
    async with SQLiteStore(db_path) as store:
        await store.create_order_with_outbox_event(ORDER)

    process = start(["outbox/main.py", "--db", str(db_path)], ROOT)
    output, errors = process.communicate(timeout=60)

    assert (process.returncode, output) == (1, "")
    assert errors == (
        f"outbox demo: {db_path} has events that wait for delivery: the demonstration needs a database of its own\n"
    )
    assert rows(db_path, "SELECT status FROM outbox") == [("PENDING",)]


def test_ctrl_c_ends_the_demo_without_a_traceback() -> None:
    process = start(["outbox/main.py"], ROOT)
    assert process.stdout is not None
    while "CYCLE 3" not in process.stdout.readline():
        pass
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)

    assert process.returncode == 130
    assert errors.strip() == "interrupted"


def test_a_database_that_cannot_be_opened_is_one_line(tmp_path: Path) -> None:
    process = start(["outbox/main.py", "--db", str(tmp_path)], ROOT)
    output, errors = process.communicate(timeout=60)

    assert (process.returncode, output) == (1, "")
    assert errors.count("\n") == 1
    assert str(tmp_path) in errors


def test_a_check_that_does_not_hold_makes_the_exit_status_1(tmp_path: Path) -> None:
    # Every second write to the dead-letter queue is lost: the demonstration must notice.
    kept = tmp_path / "kept.db"
    start(["outbox/main.py", "--db", str(kept)], ROOT).communicate(timeout=60)
    connection = sqlite3.connect(kept)
    connection.execute(
        "CREATE TRIGGER lossy AFTER INSERT ON dead_letter_queue BEGIN "
        "UPDATE dead_letter_queue SET payload_json = 'lost' WHERE id = NEW.id; END"
    )
    connection.commit()
    connection.close()

    process = start(["outbox/main.py", "--db", str(kept)], ROOT)
    output, _ = process.communicate(timeout=60)

    assert process.returncode == 1
    assert "FAILED  the dead-letter queue holds its payload" in output
