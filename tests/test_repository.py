"""What holds for the repository as a whole."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from tests.documentation import ROOT, commands, read

PAGES = ["README.md", "AGENTS.md"]


def test_requirements_txt_is_the_dependencies_and_the_extra_test() -> None:
    project = tomllib.loads(read("pyproject.toml"))["project"]
    listed = [line for line in read("requirements.txt").splitlines() if line and not line.startswith("#")]

    assert sorted(listed) == sorted(project["dependencies"] + project["optional-dependencies"]["test"])


def test_the_core_dependencies_are_the_six() -> None:
    dependencies = tomllib.loads(read("pyproject.toml"))["project"]["dependencies"]

    names = {re.split(r"[<>=\[]", dependency)[0] for dependency in dependencies}
    assert names == {"pydantic", "aiosqlite", "httpx", "sniffio", "fastapi", "uvicorn"}


@pytest.mark.parametrize("page", PAGES)
def test_each_command_of_the_front_pages_is_a_target_of_the_makefile(page: str) -> None:
    targets = re.findall(r"^([a-z-]+):", read("Makefile"), flags=re.MULTILINE)

    # They are run by .ci/run; run from here, `make test` would start itself.
    for command in commands(page):
        program, target = command.split()
        assert program == "make"
        assert target in targets


def test_the_project_check_runs_what_the_readme_says() -> None:
    for command in commands("README.md"):
        assert command in read(".ci/run")


@pytest.mark.parametrize("page", [*PAGES, "outbox/README.md", "outbox/ARTICLE.md"])
def test_each_link_leads_to_a_file(page: str) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", read(page)):
        assert (ROOT / page).parent.joinpath(target).exists(), target


def test_the_packages_do_not_import_each_other() -> None:
    for package, other in (("outbox", "circuit_breaker"), ("circuit_breaker", "outbox")):
        for source in (ROOT / package).rglob("*.py"):
            assert not re.search(rf"^\s*(from|import) {other}\b", source.read_text("utf-8"), re.MULTILINE), source


def test_no_path_of_a_developer_s_machine_is_in_the_repository() -> None:
    listing = subprocess.run(
        ["git", "grep", "-lIE", r"/(work|home|root|Users)/[a-z]", "--", ".", ":!tests/test_repository.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )

    assert listing.stdout == ""


def test_both_packages_say_that_they_are_typed() -> None:
    assert (ROOT / "outbox/py.typed").exists()
    assert (ROOT / "circuit_breaker/py.typed").exists()


def test_no_file_has_grown_beyond_one_sitting() -> None:
    for source in [*Path(ROOT, "outbox").glob("*.py"), *Path(ROOT, "circuit_breaker").glob("*.py")]:
        assert len(source.read_text("utf-8").splitlines()) <= 520, source
