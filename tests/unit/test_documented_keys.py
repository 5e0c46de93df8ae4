"""Every `section.key` that source, docs and configs name is a key of a settings tree."""

import ast
import difflib
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from apps.eval.config import EvalConfig
from apps.sandboxes.config import SandboxServerConfig
from apps.sft.config import SftConfig
from goaly.base.config.schema import keys
from goaly.plan.run_config import RunConfig
from goaly.run.policy_server_config import PolicyServerConfig

pytestmark = pytest.mark.documents

ROOT = Path(__file__).parents[2]
KEYS = {
    key.path: key
    for schema in (RunConfig, EvalConfig, SftConfig, PolicyServerConfig, SandboxServerConfig)
    for key in keys(schema)
}
SECTIONS = {path for path, key in KEYS.items() if key.section is not None and "." not in path}
FOLDERS = {folder.name for folder in (ROOT / "src" / "goaly").iterdir() if folder.is_dir()} - SECTIONS
MISTAKABLE = {folder for folder in FOLDERS if difflib.get_close_matches(folder, SECTIONS, cutoff=0.7)}
"""Folders that one may write for a section: `generate.tp` for `generator.tp`."""
DOTTED = re.compile(
    rf"(?<![\w./@-])(?:{'|'.join(SECTIONS | MISTAKABLE)})(?>\.[a-z_]\w*(?:\.[a-z0-9_]\w*)*)(?![\w(/*]|\.\w)"
)
"""Not part of a path, not a call, a class or a rank."""
FILE = re.compile(r"\.(?:jsonl?|md|parquet|py|safetensors|txt|ya?ml)$")
FENCED = re.compile(r"^( *)```.*?^\1```", re.MULTILINE | re.DOTALL)


def python_texts(source: str) -> Iterator[tuple[int, str]]:
    """The comments and the string literals of prose: those with a space."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.STRING, tokenize.COMMENT) and " " in token.string:
            yield token.start[0], token.string


def whole_literals() -> set[str]:
    """Names that are a string of their own: of spans, endpoints and tensors."""
    trees = (ast.parse(file.read_text()) for file in (ROOT / "src").rglob("*.py"))
    constants = (node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return {value for value in constants if isinstance(value, str) and DOTTED.fullmatch(value)}


def texts() -> Iterator[tuple[str, str]]:
    """What people read, each with its place."""
    for folder in ("src", "apps", "bench", "examples"):
        for file in {*(ROOT / folder).rglob("*.py")} - {*ROOT.glob("apps/coding/tasks/*/**/*.py")}:
            for line, text in python_texts(file.read_text()) if DOTTED.search(file.read_text()) else ():
                yield f"{file.relative_to(ROOT)}:{line}", text
    for file in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]:
        text = file.read_text()
        yield str(file.relative_to(ROOT)), FENCED.sub("", text)
        for block in FENCED.finditer(text):  # in code only overrides: `run.trainer.step` is Python there
            yield str(file.relative_to(ROOT)), "\n".join(re.findall(r"(?<!\S)[\w.]+=\S", block[0]))
    for file in ROOT.glob("configs/**/*.yaml"):
        yield str(file.relative_to(ROOT)), "\n".join(re.findall(r"#.*", file.read_text()))


def exists(name: str) -> bool:
    """Whether a settings tree has the key, or a mapping or a list that it may be in."""
    while name not in KEYS:
        name = name.rpartition(".")[0]
        if name in KEYS:
            return KEYS[name].section is None and isinstance(KEYS[name].default, (dict, tuple, list))
        if not name:
            return False
    return True


def unknown(text: str, others: frozenset[str] | set[str] = frozenset()) -> list[str]:
    """The names in the text that look like keys and are none."""
    found = (match[0] for match in DOTTED.finditer(text))
    return [name for name in found if not exists(name) and name not in others and not FILE.search(name)]


def test_every_key_that_source_docs_and_configs_name_exists():
    others = whole_literals()
    assert [f"{place}: {name}" for place, text in texts() for name in unknown(text, others)] == []


@pytest.mark.parametrize("wrong", ["generate.max_context", "generate.tp=2", "train.lr", "losses.name", "trainer.lr"])
def test_a_key_that_does_not_exist_is_found(wrong: str):
    assert unknown(f"must be at most `{wrong}`, or more") == [wrong.partition("=")[0]]


@pytest.mark.parametrize(
    "fine",
    [
        "trainer.optimizer.lr=1e-4",
        "loss.options.clip_low",
        "prompts.sources.0.weight",
        "trainer.step()",
        "src/goaly/reward/settings.py",
        "goaly.weights.api",
        "weights.subscriber.Subscriber",
        "model.safetensors",
        "trainer.0",
        "loss.kl_*",
    ],
)
def test_keys_paths_calls_classes_and_ranks_are_no_wrong_keys(fine: str):
    assert unknown(f"set `{fine}` for it") == []
