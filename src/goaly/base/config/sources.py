"""Where settings come from: a YAML file, perhaps based on others, and `key=value` overrides, merged by OmegaConf.

The schema's own defaults lie beneath both, so `${trainer.threads}` refers to a value even if no file sets it.
"""

import copy
import io
import re
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
from yaml import MappingNode, SequenceNode, YAMLError

from goaly.base.config.schema import Key, default_values, join, keys, members
from goaly.base.config.wording import show
from goaly.base.errors import ConfigError

OVERRIDE = "override"
DEFAULT = "default"
BASE = "base"
"""The key by which a file names another one, relative to itself, whose keys it starts from."""
YAML_WORDS = {True: ("on", "yes", "true"), False: ("off", "no", "false")}
_DOTTED = re.compile(r"[A-Za-z_]\w*(\.\w+)*")


@dataclass(slots=True, kw_only=True)
class Given:
    """All settings as plain values, their sources, and the problems of reading them.

    `texts` holds the overrides as they were typed; `unresolved` are the keys whose `${…}` has no value.
    """

    values: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    unresolved: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)

    def source(self, path: str) -> str:
        """The origin of the value at `path`: `file:line`, an override, or the schema's default."""
        while path and path not in self.sources:
            path = path.rpartition(".")[0]
        return self.sources.get(path, DEFAULT)

    def blame(self, line: str) -> str:
        """The problem's line, with the source of its value if it begins with `key=value`."""
        key = re.match(r"[^=:\s]+(?==)", line)
        return f"{line} ({self.source(key[0])})" if key else line


def read(file: str | Path | None, overrides: Sequence[str], schema: type) -> Given:
    """Merge the schema's defaults, the file's bases, the file and the overrides.

    The value that a file or an override gives for a key whose value is a mapping replaces the one before instead of
    joining it; a section without keys in the file counts as not written. A schema may have a `switch`, a key that, if
    it is true, puts the values of `switched` in place of the files', and is then false.
    """
    found = list(keys(schema))
    mappings = {key.path for key in found if isinstance(key.default, dict)}
    sections = {key.path for key in found if key.section is not None and type(None) not in members(key.annotation)}
    given = Given()
    tree = OmegaConf.create(default_values(schema))
    if file is not None:
        for content, origins in _with_bases(Path(file), given):
            written = _without_empty(content, "", sections)
            given.sources.update(origins)
            for path in mappings & origins.keys():
                OmegaConf.update(tree, path, {}, merge=False)
            _make_room(tree, written)
            tree = OmegaConf.merge(tree, OmegaConf.create(written))
            assert isinstance(tree, DictConfig)
    replaced = _replaced(tree, overrides, schema, mappings, given)
    for override in overrides:
        _apply(tree, override, given, mappings)
    if replaced:
        OmegaConf.update(tree, schema.switch, False)
    given.values.update(_without_empty(_resolve(tree, "", given), "", sections))
    for key in found:
        _read_as_typed(key, given)
    return given


def _replaced(tree: DictConfig, overrides: Sequence[str], schema: Any, mappings: set[str], given: Given) -> bool:
    """Whether the schema's switch is on; the values that it replaces are then in the tree, below the overrides."""
    if not hasattr(schema, "switch"):
        return False
    trial, scratch = copy.deepcopy(tree), Given()
    for override in overrides:
        _apply(trial, override, scratch, mappings)
    if OmegaConf.select(trial, schema.switch) is not True:
        return False
    try:
        changes = schema.switched(_resolve(trial, "", scratch))
    except ConfigError as error:
        given.problems += error.problems
        return False
    for path, value in changes.items():
        OmegaConf.update(tree, path, value, merge=False)
        given.sources = {key: origin for key, origin in given.sources.items() if not f"{key}.".startswith(f"{path}.")}
        given.sources[path] = schema.switch
    return True


def _read_as_typed(key: Key, given: Given) -> None:
    """Put back what was written where YAML read a word or text as something else: `off` as false, `007` as 7."""
    *outer, name = key.path.split(".")
    section: Any = given.values
    for part in outer:
        section = section.get(part) if isinstance(section, dict) else None
    if not isinstance(section, dict) or name not in section:
        return
    value, text, kinds = section[name], given.texts.get(key.path), members(key.annotation)
    words = [word for kind in kinds if typing.get_origin(kind) is typing.Literal for word in typing.get_args(kind)]
    if isinstance(value, bool) and bool not in kinds:
        section[name] = next((word for word in (text, *YAML_WORDS[value]) if word in words), value)
    takes_text = (str in kinds or Path in kinds) and type(value) not in kinds
    if text is not None and takes_text and not isinstance(value, str) and (value is not None or text == ""):
        section[name] = text


def _with_bases(file: Path, given: Given) -> list[tuple[dict[Any, Any], dict[str, str]]]:
    """The content and the origins of the file and of those it is based on, the farthest first.

    `base: other.yaml` stands beside the keys.
    """
    chain: list[tuple[dict[Any, Any], dict[str, str]]] = []
    seen: dict[Path, Path] = {}
    while file.resolve() not in seen:
        seen[file.resolve()] = file
        content, origins = _read_file(file, given)
        base = content.pop(BASE, None)
        chain.insert(0, (content, origins))
        if base is None:
            return chain
        file = file.parent / str(base)
    given.problems.append(f"{BASE}={file}: is based on itself ({[*seen.values()][-1]})")
    return chain


def _read_file(file: Path, given: Given) -> tuple[dict[Any, Any], dict[str, str]]:
    try:
        text = file.read_text("utf-8")
        written = OmegaConf.load(io.StringIO(text))
    except OSError as error:
        given.problems.append(f"--config={file}: cannot be read: {error.strerror or error}")
        return {}, {}
    except (YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        given.problems.append(f"--config={file}: is not valid YAML: {_one_line(error)}")
        return {}, {}
    if not isinstance(written, DictConfig):
        given.problems.append(f"--config={file}: must be a mapping of keys to values, holds {type(written).__name__}")
        return {}, {}
    return dict(OmegaConf.to_container(written)), dict(_origins(yaml.compose(text), "", str(file)))  # type: ignore[arg-type]


def _without_empty(values: dict[Any, Any], path: str, sections: set[str]) -> dict[Any, Any]:
    kept = {name: value for name, value in values.items() if value is not None or join(path, name) not in sections}
    for name, value in kept.items():
        if isinstance(value, dict):
            kept[name] = _without_empty(value, join(path, name), sections)
    return kept


def _make_room(tree: DictConfig, written: dict[Any, Any]) -> None:
    """Replace lists where mappings are written, and mappings where lists are: OmegaConf cannot merge the two."""
    for name, value in written.items():
        before = tree._get_node(name)
        if isinstance(before, DictConfig) and isinstance(value, dict):
            _make_room(before, value)
        elif isinstance(before, DictConfig | ListConfig) and isinstance(value, dict | list):
            tree[name] = value


def _apply(tree: DictConfig, override: str, given: Given, mappings: set[str]) -> None:
    path, equals, text = override.partition("=")
    path = path.strip()
    if not equals or not _DOTTED.fullmatch(path):
        given.problems.append(f"{override}: an override is written key=value, such as trainer.threads=1 ({OVERRIDE})")
        return
    try:
        parsed = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]))  # `${…}` stays as written
        assert isinstance(parsed, dict)
        value = parsed["value"]
        joins = (
            path not in mappings and isinstance(value, dict) and isinstance(OmegaConf.select(tree, path), DictConfig)
        )
        OmegaConf.update(tree, path, value, merge=joins)
    except (YAMLError, OmegaConfBaseException, ValueError) as error:  # ValueError: a name below a list
        why = getattr(error, "problem", None) or _one_line(error)
        given.problems.append(f"{path}={show(text)}: cannot be set: {why} ({OVERRIDE})")
        return
    given.sources[path] = OVERRIDE
    given.texts = {key: typed for key, typed in given.texts.items() if not path.startswith(f"{key}.")}
    if "${" not in text:
        given.texts[path] = text.strip()


def _origins(node: Any, path: str, file: str) -> Iterator[tuple[str, str]]:
    """Each key and list item below this YAML node, with its `file:line`."""
    items = [(key.value, key, value) for key, value in node.value] if isinstance(node, MappingNode) else []
    items += [(i, value, value) for i, value in enumerate(node.value)] if isinstance(node, SequenceNode) else []
    for name, place, value in items:
        yield join(path, name), f"{file}:{place.start_mark.line + 1}"
        yield from _origins(value, join(path, name), file)


def _resolve(node: DictConfig | ListConfig, path: str, given: Given, around: tuple[Any, ...] = ()) -> Any:
    """Plain values with every `${…}` replaced; a key whose value is `???` counts as not written.

    `around` are the nodes that this one is in, or that refer to it: it may refer to none of them."""
    found: dict[Any, Any] = {}
    for name in range(len(node)) if isinstance(node, ListConfig) else list(node.keys()):
        inner = join(path, name)
        line = ""
        try:
            value = node[name]
        except MissingMandatoryValue:
            continue
        except OmegaConfBaseException as error:
            written: Any = OmegaConf.to_container(node)[name]  # type: ignore[index]
            line = f"{inner}={show(written)}: {_one_line(error)}"
        else:
            if any(value is one for one in (node, *around)):
                line = f"{inner}: refers to itself"
        if line:
            given.problems.append(f"{line} ({given.source(inner)})")
            given.unresolved.add(inner)
            continue
        if isinstance(value, (DictConfig, ListConfig)):
            value = _resolve(value, inner, given, (node, *around))
        found[name] = value
    return list(found.values()) if isinstance(node, ListConfig) else found


def _one_line(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    if mark is not None:
        return f"line {mark.line + 1}: {getattr(error, 'problem', None) or 'unreadable'}"
    return str(error).strip().partition("\n")[0]
