"""Where settings come from: a YAML file, perhaps based on others, and `key=value` overrides, merged by OmegaConf.

The schema's own defaults lie beneath both, so that `${train.lr}` refers to a value whether or not anyone wrote it down.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
from yaml import YAMLError

from goaly.configuration.schema import join, show

OVERRIDE = "override"
DEFAULT = "default"
BASE = "base"
"""The key by which a file names another one, relative to itself, whose keys it starts from."""
_DOTTED = re.compile(r"[A-Za-z_]\w*(\.\w+)*")


class _Broken:
    """Stands where a value could not be resolved; its problem is already told."""


BROKEN = _Broken()


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """All settings as plain values, who wrote them, and what was wrong in the reading.

    `texts` holds the overrides as they were typed, `written` the values that could not be resolved.
    """

    values: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    written: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def source(self, path: str) -> str:
        """Who wrote the value at `path`: the file, an override, or the schema's default."""
        while path:
            if path in self.sources:
                return self.sources[path]
            path = path.rpartition(".")[0]
        return DEFAULT

    def blame(self, path: str, value: Any, complaint: str) -> str:
        """One problem's line: key, value, what would be right, and who wrote it."""
        return f"{path}={show(value)}: {complaint} ({self.source(path)})"


def read(
    file: str | Path | None,
    overrides: Sequence[str],
    defaults: dict[str, Any],
    *,
    mappings: set[str],
    sections: set[str],
) -> Given:
    """Merge defaults, the file's bases, the file and the overrides.

    The value that a file or an override gives for one of `mappings` (keys whose value is a dict) replaces the one
    before instead of joining it; one of `sections` with nothing below it in the file is as good as not written.
    """
    given = Given()
    tree = OmegaConf.create(defaults)
    if file is not None:
        for source, content in _with_bases(Path(file), given):
            written = _without_empty(content, "", sections)
            own = Given()
            _note_sources(written, "", source, own)
            given.sources.update(own.sources)
            for path in mappings & own.sources.keys():
                OmegaConf.update(tree, path, {}, merge=False)
            tree = OmegaConf.merge(tree, OmegaConf.create(written))
    assert isinstance(tree, DictConfig)
    for override in overrides:
        _apply(tree, override, given, mappings)
    given.values.update(_resolve(tree, "", given))
    return given


def _with_bases(file: Path, given: Given) -> list[tuple[str, dict[Any, Any]]]:
    """The file and those it is based on, the farthest first: `base: other.yaml` stands beside the keys."""
    chain: list[tuple[str, dict[Any, Any]]] = []
    seen: list[Path] = []
    while file.resolve() not in seen:
        seen.append(file.resolve())
        content = _read_file(file, given)
        base = content.pop(BASE, None)
        chain.insert(0, (str(file), content))
        if base is None:
            return chain
        file = file.parent / str(base)
    given.problems.append(f"{BASE}={file}: is based on itself ({chain[0][0]})")
    return chain


def _read_file(file: Path, given: Given) -> dict[Any, Any]:
    try:
        written = OmegaConf.load(file)
    except OSError as error:
        given.problems.append(f"--config={file}: can't be read: {error.strerror or error}")
        return {}
    except (YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        given.problems.append(f"--config={file}: is not sound YAML: {_one_line(error)}")
        return {}
    if not isinstance(written, DictConfig):
        given.problems.append(f"--config={file}: must be a mapping of keys to values, holds {type(written).__name__}")
        return {}
    return dict(OmegaConf.to_container(written))  # type: ignore[arg-type]


def _without_empty(values: dict[Any, Any], path: str, sections: set[str]) -> dict[Any, Any]:
    kept = {name: value for name, value in values.items() if value is not None or join(path, name) not in sections}
    for name, value in kept.items():
        if isinstance(value, dict):
            kept[name] = _without_empty(value, join(path, name), sections)
    return kept


def _apply(tree: DictConfig, override: str, given: Given, mappings: set[str]) -> None:
    path, equals, text = override.partition("=")
    path = path.strip()
    if not equals or not _DOTTED.fullmatch(path):
        given.problems.append(f"{override}: an override is written key=value, such as train.threads=1 ({OVERRIDE})")
        return
    try:
        parsed = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]))  # `${…}` stays as written
        assert isinstance(parsed, dict)
        OmegaConf.update(tree, path, parsed["value"], merge=path not in mappings)
    except (YAMLError, OmegaConfBaseException) as error:
        why = getattr(error, "problem", None) or _one_line(error)
        given.problems.append(f"{path}={show(text)}: can't be set: {why} ({OVERRIDE})")
        return
    given.sources[path] = OVERRIDE
    if "${" not in text:
        given.texts[path] = text.strip()


def _note_sources(values: Any, path: str, source: str, given: Given) -> None:
    if path:
        given.sources[path] = source
    items = values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    for name, value in items:
        _note_sources(value, join(path, name), source, given)


def _resolve(node: DictConfig | ListConfig, path: str, given: Given) -> Any:
    """Plain values with every `${…}` replaced; a key whose value is `???` is as good as not written."""
    found: dict[Any, Any] = {}
    for name in range(len(node)) if isinstance(node, ListConfig) else list(node.keys()):
        inner = join(path, name)
        try:
            value = node[name]
            if isinstance(value, (DictConfig, ListConfig)):
                value = _resolve(value, inner, given)
        except MissingMandatoryValue:
            continue
        except RecursionError:
            given.problems.append(f"{inner}: refers to itself ({given.source(inner)})")
            value = BROKEN
        except OmegaConfBaseException as error:
            raw: Any = OmegaConf.to_container(node)
            given.written[inner] = raw[name]
            given.problems.append(given.blame(inner, raw[name], _one_line(error)))
            value = BROKEN
        found[name] = value
    return list(found.values()) if isinstance(node, ListConfig) else found


def _one_line(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    if mark is not None:
        return f"line {mark.line + 1}: {getattr(error, 'problem', None) or 'unreadable'}"
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
