"""The pages of the outbox say what its code does."""

import asyncio
import importlib
import json
import re
import shlex
import socket
from pathlib import Path

import pytest

from outbox.config import AppConfig
from outbox.mock_consumer import InMemoryIdempotencyStore, create_app, serve
from tests.documentation import (
    blocks,
    commands,
    is_cut_from,
    read,
    reader_environment,
    run,
)
from tests.outbox.support import rows

EXCERPTS = blocks("outbox/ARTICLE.md", "python")
FOREGROUND = ("python -m outbox consumer", "python -m outbox dispatch")


def test_the_tutorial_has_excerpts() -> None:
    assert len(EXCERPTS) >= 10


@pytest.mark.parametrize("excerpt", EXCERPTS, ids=lambda excerpt: excerpt.splitlines()[0][:40])
def test_each_excerpt_of_the_tutorial_is_cut_from_the_source(excerpt: str) -> None:
    assert is_cut_from(["outbox"], excerpt)


def test_each_log_line_of_the_tutorial_has_the_fields_of_the_article() -> None:
    (block,) = blocks("outbox/ARTICLE.md", "json")

    for line in block.splitlines():
        assert {"timestamp", "level", "logger", "message", "event_id", "retry_count"} <= json.loads(line).keys()


async def test_the_commands_of_the_readme_work_in_their_order(tmp_path: Path) -> None:
    for command in commands("outbox/README.md"):
        if not command.startswith(FOREGROUND):
            result = await asyncio.to_thread(run, command, tmp_path)
            assert result.returncode == 0, f"{command}: {result.stderr}"


async def test_the_two_commands_in_the_foreground_deliver_what_was_ordered(tmp_path: Path) -> None:
    for command in ("python -m outbox init", "python -m outbox order --email ada@example.com --amount 149.90"):
        assert (await asyncio.to_thread(run, command, tmp_path)).returncode == 0
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])

    started = [
        await asyncio.create_subprocess_exec(
            *shlex.split(command.replace("8000", port)),
            cwd=tmp_path,
            env=reader_environment(),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        for command in commands("outbox/README.md")
        if command.startswith(FOREGROUND)
    ]
    try:
        async with asyncio.timeout(60):
            while rows(tmp_path / "outbox.db", "SELECT status FROM outbox") != [("PUBLISHED",)]:
                await asyncio.sleep(0.05)
    finally:
        for process in started:
            process.terminate()
            await process.wait()
    assert [process.returncode for process in started] == [0, 0]


async def test_the_quickstart_delivers_its_event(tmp_path: Path) -> None:
    consumer = InMemoryIdempotencyStore()
    (quickstart,) = blocks("outbox/README.md", "python")
    async with serve(create_app(consumer)) as url:
        (tmp_path / "quickstart.py").write_text(quickstart.replace("http://127.0.0.1:8000", url))
        result = await asyncio.to_thread(run, "python -W error quickstart.py", tmp_path)

    assert (result.returncode, result.stderr) == (0, "")
    assert rows(tmp_path / "outbox.db", "SELECT event_type, status FROM outbox") == [("invoice.issued", "PUBLISHED")]
    assert consumer.side_effects_count == 1


def test_the_table_of_settings_is_that_of_the_code() -> None:
    documented = re.findall(r"^\| `(\w+)` \| (.+?) \| (.+?) \|$", read("outbox/README.md"), flags=re.MULTILINE)

    for name, field in AppConfig.model_fields.items():
        default = str(field.default).removeprefix("frozenset(").removesuffix(")")
        shown = f'"{default}"' if isinstance(field.default, str | Path) else default
        wanted = "required" if field.is_required() else f"`{shown}`"
        found = [(cell, text) for row, cell, text in documented if row == name]
        assert len(found) == 1, name
        assert found[0][1] == field.description, name
        assert found[0][0].replace('"', "") == wanted.replace('"', ""), name


def test_each_name_of_the_readme_can_be_imported() -> None:
    for module, names in re.findall(r"^\| `(outbox\.\w+)` \| (.+?) \|$", read("outbox/README.md"), flags=re.MULTILINE):
        for name in re.findall(r"`(\w+)`", names):
            assert hasattr(importlib.import_module(module), name), f"{module}.{name}"
