"""The documentation's build: Sphinx with MyST. `make docs` writes it to build/docs; a warning is an error."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from apps.eval.config import EvalConfig  # noqa: E402
from apps.sft.config import SftConfig  # noqa: E402
from goaly.base.config.help import docs  # noqa: E402
from goaly.base.config.schema import Key, keys, plain  # noqa: E402
from goaly.base.config.wording import show, type_words  # noqa: E402
from goaly.plan.run_config import RunConfig  # noqa: E402
from goaly.run.policy_server_config import PolicyServerConfig  # noqa: E402

project = html_title = "goaly"
extensions = ["myst_parser", "sphinx.ext.mathjax", "sphinxcontrib.mermaid"]
myst_enable_extensions = ["dollarmath"]
myst_fence_as_directive = ["mermaid"]
myst_heading_anchors = 4
myst_disable_syntax = ["myst_role"]  # settings have texts such as `{answer}`
html_theme = "furo"

SETTINGS = "settings.md"
CONFIGS = {
    "Runs: apps.grpo, apps.ppo and apps.agent": RunConfig,
    "Supervised training: apps.sft": SftConfig,
    "Evaluation: apps.eval": EvalConfig,
    "Serving: apps.serve": PolicyServerConfig,
}


def setup(app: Any) -> None:
    """Write the page of settings before Sphinx looks for pages."""
    (Path(__file__).parent / SETTINGS).write_text("\n".join(settings()) + "\n")


def settings() -> Iterator[str]:
    """The lines of the page: each app's keys, by section, with type, default and meaning."""
    yield "# Settings\n"
    yield "Every app takes `--config FILE`, `--dry-run`, `--help` and `key=value`. This page has the texts of `--help`."
    for title, schema in CONFIGS.items():
        found = list(keys(schema))
        yield f"\n## {title}\n"
        yield from _table(found, "")
        for section in (key for key in found if key.section is not None):
            yield f"\n### {title.rpartition(' ')[2]}: `{section.path}`\n"
            yield docs(section.owner).get(section.name) or docs(section.section)[""].partition("\n\n")[0]
            yield from _table(found, section.path)


def _table(found: list[Key], section: str) -> Iterator[str]:
    own = [key for key in found if key.section is None and key.path.rpartition(".")[0] == section]
    if own:
        yield "\n| key | type | default | meaning |\n|---|---|---|---|"
    for key in own:
        default = "required" if key.required else f"`{show(plain(key.default))}`"
        meaning = docs(key.owner).get(key.name, "")
        cells = (f"`{key.path}`", type_words(key.annotation, with_bounds=True), default, meaning)
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
