"""Config loading: every problem at once, nothing changed in a round trip, help that stays true and fast."""

import pickle
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import field, replace
from math import inf
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from annotated_types import Gt, Lt
from hypothesis import given, settings
from hypothesis import strategies as st

from goaly.base.config import Loaded, exit_code, load, to_yaml
from goaly.base.config.help import help_text
from goaly.base.config.settings import PositiveInt, Section, Settings
from goaly.base.errors import ConfigError


class Optimizer(Settings):
    """The optimizer's numbers."""

    lr: float = 1e-3
    """Learning rate at
    its peak."""
    betas: tuple[float, float] = (0.9, 0.95)
    mode: Literal["keep", "drain"] = "keep"
    """What happens to running sequences."""

    def _problems(self, at: Section) -> Iterator[str]:
        if self.lr <= 0:
            yield f"{at.lr}: must be positive"


class Train(Settings):
    """How it trains."""

    optimizer: Optimizer = field(default_factory=lambda: Optimizer(lr=0.5))
    threads: int = 1
    """Threads a process."""
    checkpointing: bool | Literal["full", "selective"] = False
    progress: Literal["on", "off"] = "on"


class Source(Settings):
    file: str
    weight: float = 1.0


class Config(Settings):
    name: str
    """Names the run."""
    seed: int | None = None
    note: str | None = None
    folder: Path = Path("runs")
    lengths: list[int] = field(default_factory=list)
    mixture: dict[str, float] = field(default_factory=lambda: {"easy": 1.0})
    sources: tuple[Source, ...] = ()
    train: Train = field(default_factory=Train)
    reference: Optimizer | None = None
    extra: Any = None

    def _problems(self, at: Section) -> Iterator[str]:
        if self.seed == 13:
            yield f"{at.seed}: must not be 13"


def read(*argv: str) -> Config:
    return load(Config, argv, prog="prog", description="Does it.").config


def problems(*argv: str) -> list[str]:
    with pytest.raises(ConfigError) as error:
        read(*argv)
    return error.value.problems


@pytest.fixture
def yaml_file(tmp_path: Path):
    def write(text: str) -> str:
        path = tmp_path / "config.yaml"
        path.write_text(text)
        return str(path)

    return write


def test_override_beats_file_and_file_beats_default(yaml_file):
    file = yaml_file("name: a\nseed: 1\ntrain: {threads: 2}\n")
    config = read("--config", file, "train.threads=3")
    assert (config.name, config.seed, config.train.threads, config.train.optimizer.lr) == ("a", 1, 3, 0.5)


def test_every_problem_is_told_at_once_with_key_value_remedy_and_source(yaml_file):
    file = yaml_file(
        "seed: [1]\ntrain:\n  thread: 2\n  optimizer: {lr: fast}\n  checkpointing: half\nlengths: [1, x]\n"
    )
    found = problems("--config", file, "reference.lr=-1", "nonsense", "--verbose")
    assert found == [
        "--verbose: unknown flag; known are --config FILE, --resume FOLDER, --dry-run, --help, and key=value",
        "nonsense: an override is written key=value, such as trainer.threads=1 (override)",
        "name: missing, must be text",
        f"seed=[1]: must be an integer or null ({file}:1)",
        f"lengths.1=x: must be an integer ({file}:6)",
        f"train.optimizer.lr=fast: must be a number ({file}:4)",
        f"train.checkpointing=half: must be true or false or one of full, selective ({file}:5)",
        f"train.thread=2: unknown key; did you mean train.threads? ({file}:3)",
        "reference.lr=-1.0: must be positive (override)",
    ]


class Bounded(Settings):
    count: PositiveInt = 1
    share: Annotated[float, Gt(0), Lt(1)] | None = None
    twice: int = 2

    def _problems(self, at: Section) -> Iterator[str]:
        if self.twice % 2:
            yield f"{at.twice}: must be even"
        yield f"{at.twice}: must be 2 * {at.count}"


class Root(Settings):
    steps: PositiveInt
    left: Bounded = field(default_factory=Bounded)
    right: tuple[Bounded, ...] = ()

    def _problems(self, at: Section) -> Iterator[str]:
        yield from (f"{at}right: takes {at.steps}", f"{at}left: takes {at}left.count")


@pytest.mark.parametrize("steps", ["steps=0", "steps=x", "steps=3", ""])
def test_a_wrong_value_hides_no_other_problem_and_what_is_said_of_its_default_is_left_out(steps: str):
    overrides = [steps, "left.count=0", "left.twice=3", "right=[{count: 2, share: 1.0, twice: 5}]"]
    with pytest.raises(ConfigError) as error:
        load(Root, [override for override in overrides if override], prog="prog", description="")
    first = {
        "steps=0": ["steps=0: must be at least 1 (override)"],
        "steps=x": ["steps=x: must be an integer (override)"],
        "": ["steps: missing, must be an integer"],
    }
    with_steps = [
        "right.0.twice=5: must be even (override)",
        "right.0.twice=5: must be 2 * right.0.count=2 (override)",
        "right: takes steps=3",
    ]
    assert error.value.problems == [
        *first.get(steps, []),
        "left.count=0: must be at least 1 (override)",
        "right.0.share=1.0: must be above 0 and below 1, or null (override)",
        "left.twice=3: must be even (override)",
        *(with_steps if steps == "steps=3" else []),
    ]


def test_python_is_told_the_same_of_a_wrong_value_as_a_file():
    with pytest.raises(ConfigError) as error:
        Bounded(count=0, share=inf, twice="2")  # type: ignore[bad-argument-type]
    assert error.value.problems == [
        "Bounded.count=0: must be at least 1",
        "Bounded.share=inf: must be a finite number, or null",
        "Bounded.twice=2: must be an integer",
    ]
    with pytest.raises(ConfigError, match=r"Bounded\.cont=1: unknown key; did you mean Bounded\.count\?"):
        replace(Bounded(), cont=1)
    assert pickle.loads(pickle.dumps(Bounded(count=3))) == Bounded(count=3)


@pytest.mark.parametrize(
    ("argument", "line"),
    [
        ("train.threads=1.5", "train.threads=1.5: must be an integer (override)"),
        ("train.threads=true", "train.threads=true: must be an integer (override)"),
        ("train.threads=null", "train.threads=null: must be an integer (override)"),
        ("train.optimizer.lr=.nan", "train.optimizer.lr=nan: must be a finite number (override)"),
        (
            "train.optimizer.betas=[0.9]",
            "train.optimizer.betas=[0.9]: must be a list of 2: a number, a number (override)",
        ),
        ("train.optimizer.mode=stop", "train.optimizer.mode=stop: must be one of keep, drain (override)"),
        (
            "train=3",
            "train=3: is a section, set its keys: "
            "train.optimizer, train.threads, train.checkpointing, train.progress (override)",
        ),
        (
            "train=[3]",
            "train=[3]: is a section, set its keys: "
            "train.optimizer, train.threads, train.checkpointing, train.progress (override)",
        ),
        ("lengths={a: 1}", "lengths={a: 1}: must be a list, each an integer (override)"),
        ("lr=3", "lr=3: unknown key; did you mean train.optimizer.lr or reference.lr? (override)"),
        (
            "train.zzz=3",
            "train.zzz=3: unknown key; known here are optimizer, threads, checkpointing, progress (override)",
        ),
        ("name=null", "name=null: must be text (override)"),
        ("seed=${nowhere}", "seed=${nowhere}: Interpolation key 'nowhere' not found (override)"),
        ("sources=[{weight: 2}]", "sources.0.file: missing, must be text"),
        ("mixture={easy: much}", "mixture.easy=much: must be a number (override)"),
        ("name=[a", "name=[a: cannot be set: did not find expected ',' or ']' (override)"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_right(argument: str, line: str):
    assert problems("name=x", argument) == [line]


@pytest.mark.parametrize(
    ("argument", "key", "value"),
    [
        ("train.threads=1_000", lambda c: c.train.threads, 1000),
        ("train.optimizer.lr=1e-4", lambda c: c.train.optimizer.lr, 1e-4),
        ("train.optimizer.lr=1", lambda c: c.train.optimizer.lr, 1.0),
        ("train.checkpointing=full", lambda c: c.train.checkpointing, "full"),
        ("train.checkpointing=true", lambda c: c.train.checkpointing, True),
        ("train.progress=off", lambda c: c.train.progress, "off"),
        ("train.optimizer.mode=drain", lambda c: c.train.optimizer.mode, "drain"),
        ("train.optimizer.betas=[0,1]", lambda c: c.train.optimizer.betas, (0.0, 1.0)),
        ("name=007", lambda c: c.name, "007"),
        ("note=007", lambda c: c.note, "007"),
        ("note=null", lambda c: c.note, None),
        ("name=", lambda c: c.name, ""),
        ("name=a=b", lambda c: c.name, "a=b"),
        ("folder=else/where", lambda c: c.folder, Path("else/where")),
        ("mixture.hard=2", lambda c: c.mixture, {"easy": 1.0, "hard": 2.0}),
        ("sources=[{file: a}]", lambda c: c.sources, (Source(file="a"),)),
        ("reference={}", lambda c: c.reference, Optimizer()),
        ("reference.lr=${train.optimizer.lr}", lambda c: c.reference, Optimizer(lr=0.5)),
        ("name=run-${train.threads}", lambda c: c.name, "run-1"),
    ],
)
def test_an_override_is_read_as_its_key_demands(argument: str, key, value):
    found = key(read("name=x", argument))
    assert found == value
    assert type(found) is type(value)


def test_an_interpolation_sees_a_later_override(yaml_file):
    file = yaml_file("name: x\nseed: ${train.threads}\n")
    assert read("--config", file, "train.threads=9").seed == 9


def test_interpolations_that_chase_each_other_are_a_problem_not_a_crash(yaml_file):
    found = problems("--config", yaml_file("name: x\ntrain: ${reference}\nreference: ${train}\n"))
    assert any(line.startswith("train") for line in found)
    assert problems("--config", yaml_file("name: x\nextra: {inner: '${extra}'}\n"))


def test_a_mapping_in_the_file_replaces_the_default_mapping(yaml_file):
    assert read("--config", yaml_file("name: x\nmixture: {hard: 1}\n")).mixture == {"hard": 1.0}


def test_a_mapping_in_an_override_replaces_that_of_the_file_and_a_key_below_it_joins(yaml_file):
    file = yaml_file("name: x\nmixture: {hard: 1}\n")
    assert read("--config", file, "mixture={}").mixture == {}
    assert read("--config", file, "mixture={easy: 2}").mixture == {"easy": 2.0}
    assert read("--config", file, "mixture.easy=2").mixture == {"hard": 1.0, "easy": 2.0}


def test_a_word_that_yaml_takes_for_a_truth_value_is_still_a_choice(yaml_file):
    assert read("--config", yaml_file("name: x\ntrain: {progress: off}\n")).train.progress == "off"


def test_a_section_left_empty_in_the_file_keeps_its_defaults(yaml_file):
    assert read("--config", yaml_file("name: x\ntrain: {optimizer: }\n")).train.optimizer.lr == 0.5
    file = yaml_file("name: x\ntrain:\nreference:\n")
    assert read("--config", file).train == Train()
    assert read("--config", file).reference is None
    assert read("--config", file, "train.threads=2").train.optimizer.lr == 0.5


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("- a\n", "must be a mapping of keys to values, holds ListConfig"),
        ("a: [1\n", "is not valid YAML: line 2: did not find expected ',' or ']'"),
        ("name: a\nname: b\n", "is not valid YAML: line 2: found duplicate key name"),
    ],
)
def test_an_unsound_file_is_one_problem_beside_the_others(yaml_file, text: str, line: str):
    file = yaml_file(text)
    assert problems("--config", file, "seed=x")[:1] == [f"--config={file}: {line}"]
    assert "seed=x: must be an integer or null (override)" in problems("--config", file, "seed=x")


def test_a_missing_file_is_a_problem(tmp_path: Path):
    assert problems("--config", str(tmp_path / "no.yaml"), "name=x") == [
        f"--config={tmp_path / 'no.yaml'}: cannot be read: No such file or directory"
    ]
    assert problems("name=x", "--config") == ["--config: names no file, write --config FILE"]


def test_a_file_with_a_list_for_a_section_or_the_reverse_is_told_its_line(tmp_path: Path):
    file = tmp_path / "config.yaml"
    file.write_text("name: x\ntrain: [1]\nlengths: {a: 1}\nmixture: [easy]\n")
    found = problems("--config", str(file))
    assert [line.partition(":")[0] for line in found] == ["lengths={a", "mixture=[easy]", "train=[1]"]
    assert [line.rpartition(":")[2] for line in found] == ["3)", "4)", "2)"]
    file.write_text("base: wrong.yaml\ntrain: {threads: 2}\nlengths: [3]\n")
    (tmp_path / "wrong.yaml").write_text("name: x\ntrain: [1]\nlengths: {a: 1}\n")
    config = read("--config", str(file))
    assert (config.train.threads, config.lengths) == (2, [3])


def test_an_override_below_the_text_of_another_is_told():
    assert problems("name=a", "name.x=1") == ["name={x: 1}: must be text (override)"]
    assert read("name.x=1", "name=a").name == "a"


def test_a_file_based_on_another_starts_from_its_keys(tmp_path: Path):
    (tmp_path / "deep.yaml").write_text("name: deep\nseed: 1\nmixture: {hard: 1}\ntrain: {threads: 2}\n")
    (tmp_path / "middle.yaml").write_text("base: deep.yaml\nname: middle\nlengths: [1, 2]\n")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "top.yaml").write_text(
        "base: ../middle.yaml\nmixture: {easy: 2}\nlengths: [3]\ntrain: {optimizer: {lr: 2}}\n"
    )
    config = read("--config", str(tmp_path / "sub" / "top.yaml"), "seed=5")
    assert (config.name, config.seed, config.lengths, config.mixture) == ("middle", 5, [3], {"easy": 2.0})
    assert (config.train.threads, config.train.optimizer.lr) == (2, 2.0)


def test_a_problem_in_a_base_names_that_file(tmp_path: Path):
    (tmp_path / "deep.yaml").write_text("name: x\nseed: x\nlengths: x\n")
    (tmp_path / "top.yaml").write_text("base: deep.yaml\nlengths: y\n")
    assert problems("--config", str(tmp_path / "top.yaml")) == [
        f"seed=x: must be an integer or null ({tmp_path / 'deep.yaml'}:2)",
        f"lengths=y: must be a list, each an integer ({tmp_path / 'top.yaml'}:2)",
    ]


def test_loaded_says_which_file_and_whether_it_is_a_dry_run(yaml_file):
    file = yaml_file("name: x\n")
    loaded = load(Config, [f"--config={file}", "--dry-run"], prog="prog", description="")
    assert loaded == Loaded(config=Config(name="x"), dry_run=True, path=Path(file))
    assert load(Config, ["name=x"], prog="prog", description="").path is None


texts = st.one_of(st.text(max_size=12), st.sampled_from(["${x}", "\\${x}", "a\\\\${b", "off", "1e3", "~", "x: y", "$"]))
floats = st.floats(allow_nan=False, allow_infinity=False)
optimizers = st.builds(
    Optimizer,
    lr=floats.filter(lambda lr: lr > 0),
    betas=st.tuples(floats, floats),
    mode=st.sampled_from(["keep", "drain"]),
)
configs = st.builds(
    Config,
    name=texts.filter(lambda text: text != "???"),
    seed=st.none() | st.integers().filter(lambda seed: seed != 13),
    folder=st.sampled_from([Path("a/b"), Path("${HOME}/x")]),
    lengths=st.lists(st.integers(), max_size=3),
    mixture=st.dictionaries(st.text("a.1e", min_size=1, max_size=3), floats, max_size=2),
    sources=st.lists(st.builds(Source, file=st.just("f"), weight=floats), max_size=2).map(tuple),
    train=st.builds(
        Train, optimizer=optimizers, threads=st.integers(), checkpointing=st.sampled_from([True, False, "full"])
    ),
    reference=st.none() | optimizers,
    extra=st.sampled_from([None, 1, "a", [1, {"a": [None]}], {"b": 2.5}]),
)


@settings(deadline=None)
@given(configs)
def test_the_written_config_reads_back_as_the_same_config(tmp_path_factory, config: Config):
    file = tmp_path_factory.getbasetemp() / "roundtrip.yaml"
    file.write_text(to_yaml(config), encoding="utf-8")
    assert read("--config", str(file)) == config


def test_docstrings_are_found_in_classes_defined_inside_functions_and_inherited():
    class Child(Train):
        own: int = 0
        """Its own."""

    page = help_text(Child, prog="prog", description="")
    assert "Its own." in page
    assert "Threads a process." in page


def test_help_exits_with_0_and_imports_nothing_heavy():
    script = (
        "import sys\n"
        "from goaly.base.config import load\n"
        "from goaly.base.telemetry.settings import TelemetrySettings\n"
        "try: load(TelemetrySettings, ['--help'], prog='p', description='d')\n"
        "except SystemExit as end: assert end.code == 0\n"
        "heavy = {'omegaconf', 'yaml', 'rich', 'torch', 'numpy', 'tensorboard'} & sys.modules.keys()\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    assert "trace = true: true or false" in done.stdout


@pytest.mark.parametrize("app", ["grpo", "ppo", "sft", "eval", "serve", "agent"])
def test_the_help_of_an_app_waits_for_no_torch(app: str):
    command = [sys.executable, "-X", "importtime", "-m", f"apps.{app}.main", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith(f"usage: python -m apps.{app}.main ")
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "goaly.base.config" in imported
    assert not {"monarch", "numpy", "omegaconf", "rich", "tensordict", "torch", "transformers"} & imported


def test_config_problems_are_told_without_a_traceback_and_the_exit_code_is_2(capsys):
    assert exit_code(lambda loaded: None, Config, ["train.thread=1"], prog="prog", description="") == 2
    assert capsys.readouterr().err == (
        "prog: 2 problems with the configuration\n"
        "  name: missing, must be text\n"
        "  train.thread=1: unknown key; did you mean train.threads? (override)\n"
        "`prog --help` explains every key.\n"
    )


def test_the_exit_code_is_what_main_returns_and_its_errors_pass():
    def failing(loaded: Loaded[Config]) -> int:
        raise RuntimeError(loaded.config.name)

    assert exit_code(lambda loaded: 3, Config, ["name=x"], prog="prog", description="") == 3
    assert exit_code(lambda loaded: None, Config, ["name=x"], prog="prog", description="") == 0
    with pytest.raises(RuntimeError, match="x"):
        exit_code(failing, Config, ["name=x"], prog="prog", description="")


def test_a_field_that_no_yaml_can_hold_is_refused_whatever_was_given():
    class Wrong(Settings):
        when: set[int] = field(default_factory=set)

    with pytest.raises(TypeError, match="cannot hold"):
        load(Wrong, [], prog="prog", description="")
