"""The help page, as a user sees it."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from goaly.base.config.help import docs, help_text
from goaly.base.config.settings import PositiveInt, Settings


class Mixed(Settings):
    """What is mixed in."""

    share: float
    """Its share."""
    name: str = "a"


class Model(Settings):
    """A model.

    This is not read in the help.
    """

    layers: PositiveInt = 2
    """How many layers
    it has."""


class Run(Settings):
    """A run."""

    steps: PositiveInt
    """Steps of training: each takes a batch of groups, trains the policy on it, and publishes the weights."""
    note: str | None = None
    """See https://example.com/a_very_long_address_that_nobody_should_ever_cut_in_two/whatever."""
    mixture: tuple[Mixed, ...] = ()
    model: Model = field(default_factory=Model)
    """The policy."""
    critic: Model | None = None
    judge: Model | None = field(default_factory=Model)

    def refused_changes(self, changed: "Run") -> Iterator[str]:
        """It can be resumed."""
        yield from ()


PAGE = """\
usage: prog [--config FILE] [--dry-run] [--help] [key=value ...]
       prog --resume FOLDER [--dry-run] [key=value ...]

Does it.
Slowly.

  --config FILE   a YAML file with any of the keys below
  --resume FOLDER go on with the run in this folder; some keys may be changed
  --dry-run       check everything, show what would run, start nothing
  --help          this text

A key=value on the command line wins over the file, the file
over the one that its `base: FILE` names, that over the
defaults. Values are YAML: names=[a,b] is a list, key=null
is no value, and ${other.key} stands for another key's
value.

  steps (required): an integer (at least 1)
      Steps of training: each takes a batch of groups,
      trains the policy on it, and publishes the weights.
  note = null: text or null
      See
      https://example.com/a_very_long_address_that_nobody_should_ever_cut_in_two/whatever.
  mixture = []: a list, each a section (share, name)
        share: Its share.

model: The policy.
  model.layers = 2: an integer (at least 1)
      How many layers it has.

critic (off unless set): A model.
  critic.layers = 2: an integer (at least 1)
      How many layers it has.

judge: A model.
  judge.layers = 2: an integer (at least 1)
      How many layers it has.
"""


def test_the_page_of_an_app_that_resumes_runs_is_this() -> None:
    assert help_text(Run, prog="prog", description="Does it.\nSlowly.", width=60) == PAGE


def test_an_app_that_resumes_nothing_does_not_speak_of_it() -> None:
    page = help_text(Model, prog="prog", description="Does it.", width=60)
    assert "resume" not in page
    assert page.startswith("usage: prog [--config FILE] [--dry-run] [--help] [key=value ...]\n\nDoes it.\n\n  --config")


@pytest.mark.parametrize(("columns", "width"), [(20, 60), (90, 90), (400, 120)])
def test_the_page_is_as_wide_as_the_terminal_but_not_too_narrow_or_too_wide_to_read(
    columns: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    short_words = "x " * 200
    page = help_text(Model, prog="prog", description=short_words)
    assert page == help_text(Model, prog="prog", description=short_words, width=width)
    assert max(map(len, page.splitlines()[2:4])) in (width, width - 1)


def test_docstrings_are_found_beside_bases_without_a_source_and_in_plain_dataclasses() -> None:
    generated: Any = type("Generated", (Settings,), {})

    class Child(generated):
        own: Literal["a"] = "a"
        """Its own."""

    @dataclass
    class Plain:
        """Plain."""

        own: int = 0
        """Also its own."""

    assert docs(Child)["own"] == "Its own."
    assert docs(Plain) == {"": "Plain.", "own": "Also its own."}
