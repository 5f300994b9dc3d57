"""The command line, run as its users run it: as a process."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from outbox.config import AppConfig
from outbox.database import SQLiteStore
from outbox.dispatcher import OutboxDispatcher
from tests.documentation import ROOT
from tests.outbox.support import ORDER, rows

ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
COMMAND = [sys.executable, "-W", "error", "-m", "outbox"]


def outbox(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments], cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, timeout=60, check=False
    )


def succeed(*arguments: str, cwd: Path) -> str:
    result = outbox(*arguments, cwd=cwd)
    assert result.returncode == 0, result.stderr
    return result.stdout


def as_json(*arguments: str, cwd: Path) -> Any:
    return json.loads(succeed(*arguments, "--json", cwd=cwd))


@contextmanager
def in_the_foreground(*arguments: str, cwd: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [*COMMAND, *arguments],
        cwd=cwd,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    succeed("init", cwd=tmp_path)
    return tmp_path


@pytest.fixture
async def with_two_dead_letters(folder: Path) -> Path:
    async with SQLiteStore(folder / "outbox.db") as store:
        for _ in range(2):
            await store.create_order_with_outbox_event(ORDER)
        for event in await store.claim_batch(10, 30):
            await store.record_event_failure_or_quarantine(event, "HTTP 400: no\nsuch field", 3, None)
    return folder


def test_an_order_goes_from_the_command_line_to_the_consumer(folder: Path) -> None:
    placed = as_json("order", "--email", "ada@example.com", "--amount", "10.10", cwd=folder)
    assert placed["order"]["amount"] == "10.10"
    assert as_json("stats", cwd=folder)["counts"]["PENDING"] == 1

    with in_the_foreground("consumer", "--port", "0", cwd=folder) as consumer:
        assert consumer.stdout is not None
        url = consumer.stdout.readline().removeprefix("listening on ").strip()
        with in_the_foreground("dispatch", "--endpoint", url, cwd=folder) as dispatcher:
            assert dispatcher.stderr is not None
            line = json.loads(dispatcher.stderr.readline())
            assert line["event_id"] == placed["event"]["id"]
            assert line["status_code"] == 200
            dispatcher.send_signal(signal.SIGTERM)
            _, errors = dispatcher.communicate(timeout=30)
            assert dispatcher.returncode == 0
            assert [json.loads(line)["message"].split(",")[0] for line in errors.splitlines()] == ["Stopping"]
        consumer.send_signal(signal.SIGINT)
        consumer.communicate(timeout=30)
        assert consumer.returncode == 0

    counts = as_json("stats", cwd=folder)
    assert counts == {
        "counts": {"PENDING": 0, "PROCESSING": 0, "PUBLISHED": 1, "DEAD_LETTER": 0},
        "oldest_pending_age_seconds": None,
    }


async def test_sigterm_lets_the_delivery_under_way_finish(folder: Path) -> None:
    arrived, may_answer = asyncio.Event(), asyncio.Event()

    async def answer_late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        arrived.set()
        await may_answer.wait()
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        await writer.drain()
        writer.close()

    await asyncio.to_thread(succeed, "order", "--email", "ada@example.com", "--amount", "1", cwd=folder)
    server = await asyncio.start_server(answer_late, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        with in_the_foreground("dispatch", "--endpoint", f"http://127.0.0.1:{port}/", cwd=folder) as dispatcher:
            await asyncio.wait_for(arrived.wait(), 30)
            dispatcher.send_signal(signal.SIGTERM)
            may_answer.set()
            await asyncio.to_thread(dispatcher.communicate, timeout=30)
            assert dispatcher.returncode == 0

    assert rows(folder / "outbox.db", "SELECT status FROM outbox") == [("PUBLISHED",)]


async def test_a_second_ctrl_c_gives_the_event_back_at_once(folder: Path) -> None:
    arrived = asyncio.Event()

    async def never_answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        arrived.set()
        await reader.read()
        writer.close()

    await asyncio.to_thread(succeed, "order", "--email", "ada@example.com", "--amount", "1", cwd=folder)
    server = await asyncio.start_server(never_answer, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        with in_the_foreground("dispatch", "--endpoint", f"http://127.0.0.1:{port}/", cwd=folder) as dispatcher:
            await asyncio.wait_for(arrived.wait(), 30)
            dispatcher.send_signal(signal.SIGINT)
            assert dispatcher.stderr is not None
            assert "Stopping" in await asyncio.to_thread(dispatcher.stderr.readline)
            dispatcher.send_signal(signal.SIGINT)
            _, errors = await asyncio.to_thread(dispatcher.communicate, timeout=30)
            assert dispatcher.returncode == 1
            assert errors == "outbox: interrupted\n"

    assert rows(folder / "outbox.db", "SELECT status, retry_count FROM outbox") == [("PENDING", 0)]


def test_dead_letters_are_listed_with_their_reason_on_one_line(with_two_dead_letters: Path) -> None:
    text = succeed("dead-letters", cwd=with_two_dead_letters)
    records = as_json("dead-letters", cwd=with_two_dead_letters)

    assert text.count("\n") == 2
    for line, record in zip(text.splitlines(), records, strict=True):
        assert record["original_event_id"] in line
        assert line.endswith("HTTP 400: no such field")


def test_replay_sends_one_or_all_on_their_way_and_a_dry_run_none(with_two_dead_letters: Path) -> None:
    ids = [record["original_event_id"] for record in as_json("dead-letters", cwd=with_two_dead_letters)]

    assert as_json("replay", "--all", "--dry-run", cwd=with_two_dead_letters) == {"replayed": ids, "dry_run": True}
    assert as_json("stats", cwd=with_two_dead_letters)["counts"]["DEAD_LETTER"] == 2
    assert as_json("replay", ids[1], cwd=with_two_dead_letters) == {"replayed": [ids[1]], "dry_run": False}
    assert as_json("stats", cwd=with_two_dead_letters)["counts"]["DEAD_LETTER"] == 1
    assert succeed("replay", "--all", cwd=with_two_dead_letters) == f"replayed 1\n{ids[0]}\n"
    assert succeed("replay", "--all", cwd=with_two_dead_letters) == "replayed 0\n"
    assert as_json("stats", cwd=with_two_dead_letters)["counts"]["PENDING"] == 2


def test_replaying_an_unknown_id_replays_nothing(with_two_dead_letters: Path) -> None:
    known = as_json("dead-letters", cwd=with_two_dead_letters)[0]["original_event_id"]

    result = outbox("replay", known, "unknown", cwd=with_two_dead_letters)

    assert result.returncode == 1
    assert result.stderr == "outbox: no dead letter for event unknown: nothing was replayed\n"
    assert as_json("stats", cwd=with_two_dead_letters)["counts"]["DEAD_LETTER"] == 2


async def test_purge_deletes_what_was_published_long_enough_ago(folder: Path, consumer_url: str) -> None:
    async with SQLiteStore(folder / "outbox.db") as store:
        await store.create_order_with_outbox_event(ORDER)
        await OutboxDispatcher(AppConfig(consumer_endpoint=consumer_url), store).process_batch()

    assert as_json("purge", "--older-than", "7d", cwd=folder) == {"purged": 0}
    assert succeed("purge", "--older-than", "0s", cwd=folder) == "purged 1\n"


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["stats", "--db", "missing.db"], 1, "missing.db does not exist"),
        (["stats", "--db", "."], 1, "unable to open database file"),
        (["init", "--db", "no/such/folder/outbox.db"], 1, "no/such/folder/outbox.db"),
        (["order", "--email", "ada@example.com", "--amount", "NaN"], 1, "amount: "),
        (["order", "--email", "nobody", "--amount", "1"], 1, "customer_email: "),
        (["order", "--email", "ada@example.com"], 2, "--amount"),
        (["dispatch"], 2, "--endpoint"),
        (["dispatch", "--endpoint", "ftp://host/"], 1, "consumer_endpoint: must be an http:// or https:// URL"),
        (["dispatch", "--endpoint", "http://host/", "--batch-size", "0"], 1, "batch_size: "),
        (["dispatch", "--endpoint", "http://host/", "--lease-seconds", "1"], 1, "lease_seconds: must be greater"),
        (["dispatch", "--endpoint", "http://host/", "--permanent-failure-statuses", "x"], 1, "permanent_failure_sta"),
        (["consumer", "--port", "99999"], 2, "'99999' is no port"),
        (["purge", "--older-than", "7"], 2, "'7' is no time span"),
        (["replay"], 2, "ID --all"),
        (["replay", "--all", "x"], 2, "not allowed with"),
        (["dead-lettres"], 2, "dead-lettres"),
        ([], 2, "COMMAND"),
    ],
)
def test_an_error_is_one_line_on_standard_error(arguments: list[str], status: int, message: str, folder: Path) -> None:
    result = outbox(*arguments, cwd=folder)

    assert (result.returncode, result.stdout) == (status, "")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_taken_port_is_one_line(folder: Path) -> None:
    with in_the_foreground("consumer", "--port", "0", cwd=folder) as first:
        assert first.stdout is not None
        port = first.stdout.readline().removesuffix("/webhooks\n").rsplit(":", 1)[1]
        second = outbox("consumer", "--port", port, cwd=folder)

    assert second.returncode == 1
    assert second.stderr.count("\n") == 1


def test_a_file_that_is_no_database_is_left_as_it_is(folder: Path) -> None:
    notes = folder / "notes.txt"
    notes.write_text("not a database, but a page of notes\n" * 100)

    result = outbox("stats", "--db", "notes.txt", cwd=folder)

    assert result.returncode == 1
    assert "notes.txt: file is not a database" in result.stderr
    assert notes.read_text() == "not a database, but a page of notes\n" * 100
