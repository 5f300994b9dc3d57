"""How a page of documentation is held to the code: excerpts are compared with the source, commands are run."""

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

ROOT = Path(__file__).parents[1]

_BLOCK = re.compile(
    r"^(?:<!-- from (?P<source>\S+) -->\n)?^```(?P<language>\w+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, and the file that the comment above it says it is cut from."""

    language: str
    text: str
    source: str | None


def blocks(page: str, language: str) -> list[Block]:
    found = [Block(match["language"], match["text"], match["source"]) for match in _BLOCK.finditer(read(page))]
    return [block for block in found if block.language == language]


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def is_cut_from_its_source(block: Block) -> bool:
    """Whether the block stands in its source line for line; a line `...` in it stands for lines left out."""
    if block.source is None:
        return False
    rest = _lines(read(block.source))
    for piece in re.split(r"^[ ]*\.\.\.\n", block.text, flags=re.MULTILINE):
        wanted = _lines(piece)
        starts = [at for at in range(len(rest) - len(wanted) + 1) if rest[at : at + len(wanted)] == wanted]
        if not starts:
            return False
        rest = rest[starts[0] + len(wanted) :]
    return True


def _lines(text: str) -> list[str]:
    """Without indentation and blank lines: an excerpt begins at the margin."""
    return [line.strip() for line in dedent(text).splitlines() if line.strip()]


def commands(page: str) -> list[str]:
    """The commands of the page's `sh` blocks, without their comments."""
    lines = [line for block in blocks(page, "sh") for line in block.text.splitlines()]
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
