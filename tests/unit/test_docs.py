"""The documentation names only files, modules, configs and apps that exist."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.documents

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
LOG = ROOT / "docs/log.md"
"""Names files as they were. `make docs` checks its links."""
PAGES = sorted({*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")} - {LOG})
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
MODULE = re.compile(r"(?:python|bin/python) -m ([\w.]+)")
FILE = re.compile(r"(?<![\w/.{}-])((?:src|apps|bench|configs|docs|tests|constraints)/[\w./-]*[\w-])(?![\w/*{])")
SOURCE = re.compile(r"`([a-z_]+(?:/[a-z_]+)*\.py)`")
PAST = re.compile(r"`[^`]+` of commit `\w+`")
"""A file of the past, such as the program of an experiment."""
TARGET = re.compile(r"(?:^|`)\s*make ([a-z]+)", re.MULTILINE)


@pytest.fixture(params=PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def page(request: pytest.FixtureRequest) -> Path:
    return request.param


def test_relative_links_lead_to_files(page: Path):
    links = [link.partition("#")[0] for link in LINK.findall(page.read_text()) if "://" not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_modules_of_commands_exist(page: Path):
    modules = {name.rstrip(".") for name in MODULE.findall(page.read_text())} - {"venv", "pytest", "pip"}
    assert [name for name in sorted(modules) if find_spec(name) is None] == []


def test_files_that_are_named_exist(page: Path):
    named = sorted(set(FILE.findall(PAST.sub("", page.read_text()))))
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_source_files_that_are_named_exist(page: Path):
    folders = [ROOT, ROOT / "src" / "goaly", *(ROOT / "src" / "goaly").iterdir()]
    named = sorted(set(SOURCE.findall(PAST.sub("", page.read_text()))))
    tests = {path.name for path in (ROOT / "tests").rglob("*.py")}
    assert [name for name in named if name not in tests and not any((here / name).exists() for here in folders)] == []


def test_make_targets_that_are_named_exist(page: Path):
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(TARGET.findall(page.read_text())) - targets == set()


@pytest.mark.parametrize("name", ["README.md", "docs/write_an_algorithm.md"])
def test_grpo_is_shown_as_it_is(name: str):
    script = (ROOT / "apps/grpo/main.py").read_text()
    blocks = re.findall(r"```python\n(async def .*?)```", (ROOT / name).read_text(), re.DOTALL)
    assert all(block in script for block in blocks)
    assert all(f"async def {function}(" in "".join(blocks) for function in ("episode", "collect", "train"))


def test_the_readme_is_short():
    assert len(README.read_bytes()) <= 7000
