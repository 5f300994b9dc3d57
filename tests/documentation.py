"""How a page of documentation is held to the code: excerpts are compared with the source, commands are run."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

ROOT = Path(__file__).parents[1]


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str, language: str) -> list[str]:
    """The text of the page's fenced blocks in this language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", read(page), re.DOTALL | re.MULTILINE)


def is_cut_from(folders: list[str], excerpt: str) -> bool:
    """Whether the excerpt stands in a source file of these folders, moved to the margin but otherwise as it is."""
    return any(
        _is_cut_from(path.read_text(encoding="utf-8").splitlines(), excerpt.splitlines())
        for folder in folders
        for path in (ROOT / folder).glob("*.py")
    )


def _is_cut_from(lines: list[str], excerpt: list[str]) -> bool:
    starts = (at for at, line in enumerate(lines) if line.strip() == excerpt[0].strip())
    return any(dedent("\n".join(lines[at : at + len(excerpt)])) == "\n".join(excerpt) for at in starts)


def commands(page: str) -> list[str]:
    """The commands of the page's `sh` blocks, without their comments."""
    lines = [line for block in blocks(page, "sh") for line in block.splitlines()]
    return [command for line in lines if (command := line.split("#")[0].strip())]


def reader_environment() -> dict[str, str]:
    """This Python and this checkout, as a reader has them who has activated the virtual environment."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)}


def run(command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run one command of a page as its reader would, in the folder `cwd`."""
    return subprocess.run(
        shlex.split(command),
        cwd=cwd,
        env=reader_environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
