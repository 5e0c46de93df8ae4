"""Line files survive crashes, company and full disks; JSON that others wrote is read within limits."""

import errno
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from goaly.base import atomic_files, json_text
from goaly.base.json_text import MOST_DEPTH, LineFile, bounded_json, last_record, read_lines

records = st.dictionaries(
    st.text(max_size=5), st.none() | st.integers() | st.text() | st.lists(st.integers(), max_size=3), max_size=4
)


@settings(deadline=None)
@given(before=st.lists(records, min_size=1, max_size=4), after=st.lists(records, max_size=3), data=st.data())
def test_a_crash_in_the_middle_of_a_line_loses_that_line_only(tmp_path_factory, before, after, data):
    path = tmp_path_factory.mktemp("lines") / "file.jsonl"
    first = LineFile(path)
    first.write(*before)
    first.close()
    written = path.read_bytes()
    cut = data.draw(st.integers(0, len(written)))
    path.write_bytes(written[:cut])
    whole = written[:cut].count(b"\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(atomic_files, "PART_BYTES", 7)
        LineFile(path).write(*after)
    # Every reader of JSON lines reads the file, also one that stops at a cut line.
    assert [json.loads(line) for line in path.read_text().split("\n")[:-1]] == before[:whole] + after


LIMITED = """
import resource, signal, sys
from goaly.base.json_text import LineFile
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20, resource.RLIM_INFINITY))
lines = LineFile(sys.argv[1])
for number in range(3):
    lines.write({"number": number})
sys.exit(lines.lost)
"""


def test_a_disk_that_gets_full_in_the_middle_of_a_line_leaves_whole_lines(tmp_path: Path):
    path = tmp_path / "file.jsonl"
    assert subprocess.run([sys.executable, "-c", LIMITED, str(path)], stderr=subprocess.DEVNULL).returncode == 2
    assert path.read_text() == '{"number":0}\n'


def test_a_line_that_another_process_is_writing_is_not_cut_off(tmp_path: Path):
    path = tmp_path / "file.jsonl"
    first, other = atomic_files.open_lines(path), atomic_files.open_lines(path)
    os.close(first)
    os.write(other, b'{"half":')
    LineFile(path).close()
    os.write(other, b"1}\n")
    assert list(read_lines(path)) == [{"half": 1}]


def test_a_log_keeps_a_cut_line_and_goes_on_in_the_next_one(tmp_path: Path):
    path = tmp_path / "a.log"
    path.write_text("one\nhalf")
    with os.fdopen(atomic_files.open_lines(path, cut=False), "a") as log:
        log.write("next\n")
    assert path.read_text() == "one\nhalf\nnext\n"


@settings(deadline=None)
@given(written=st.lists(records, max_size=4), cut=st.integers(0, 30))
def test_the_last_record_is_the_last_whole_line(tmp_path_factory, written, cut):
    path = tmp_path_factory.mktemp("lines") / "file.jsonl"
    assert last_record(path) is None
    LineFile(path).write(*written)
    path.write_bytes(path.read_bytes()[: max(0, path.stat().st_size - cut)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_text, "TAIL_BYTES", 7)
        assert last_record(path) == next(iter(reversed(list(read_lines(path)))), None)


WRITE_MANY = """
import sys
from goaly.base.json_text import LineFile
lines = LineFile(sys.argv[1])
for index in range(100):
    lines.write({"writer": int(sys.argv[2]), "index": index, "padding": "x" * 20_000})
"""


def test_lines_of_several_processes_never_interleave(tmp_path: Path):
    path = tmp_path / "shared.jsonl"
    command = [sys.executable, "-c", WRITE_MANY, str(path)]
    writers = [subprocess.Popen([*command, str(writer)]) for writer in range(3)]
    assert [process.wait(60) for process in writers] == [0, 0, 0]
    found = [(line["writer"], line["index"]) for line in map(json.loads, path.read_text().split())]
    assert sorted(found) == [(writer, index) for writer in range(3) for index in range(100)]


def test_a_full_disk_costs_lines_and_one_warning_but_never_raises(caplog: pytest.LogCaptureFixture):
    lines = LineFile("/dev/full")
    with caplog.at_level(logging.WARNING):
        lines.write({"a": 1}, {"a": 2})
        lines.write({"a": 3})
    assert lines.lost == 3
    assert [record.getMessage() for record in caplog.records] == [
        "/dev/full: a record could not be written and is lost: [Errno 28] No space left on device"
    ]


def test_a_record_that_cannot_be_set_up_raises_at_once(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"file"):
        LineFile(tmp_path / "file" / "metrics.jsonl")


def test_a_closed_file_takes_no_lines(tmp_path: Path):
    lines = LineFile(tmp_path / "a.jsonl")
    lines.write({"a": 1})
    lines.close()
    lines.write({"a": 2})
    assert list(read_lines(tmp_path / "a.jsonl")) == [{"a": 1}]
    assert lines.lost == 1


def test_lines_are_strict_json_whatever_is_written(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    LineFile(path).write(
        {"nan": float("nan"), "deep": [{"inf": float("inf")}], "path": Path("x"), "half": "\ud800", "wide": "é漢"}
    )
    line = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert line == {"nan": None, "deep": [{"inf": None}], "path": "x", "half": "\ud800", "wide": "é漢"}


def test_what_json_cannot_hold_at_all_is_counted_not_raised(tmp_path: Path):
    circle: list = []
    circle.append(circle)
    lines = LineFile(tmp_path / "a.jsonl")
    lines.write({"circle": circle})
    lines.write({"a": 1})
    assert lines.lost == 1
    assert list(read_lines(tmp_path / "a.jsonl")) == [{"a": 1}]


def test_a_file_system_that_fails_when_the_file_is_closed_costs_one_warning(tmp_path: Path, caplog, monkeypatch):
    def fails(descriptor: int) -> None:
        close(descriptor)
        raise OSError(errno.EIO, "Input/output error")

    close = os.close
    lines = LineFile(tmp_path / "a.jsonl")
    with monkeypatch.context() as patched:
        patched.setattr(os, "close", fails)
        lines.close()
        lines.close()
    assert caplog.messages == [f"{tmp_path / 'a.jsonl'}: the last records may be lost: [Errno 5] Input/output error"]


def nested(depth: int, inner: str = "") -> str:
    return "[" * depth + inner + "]" * depth


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        "ä😀\n",
        -0.0,
        2**64,
        sys.float_info.max,
        int(sys.float_info.max),
        {},
        [{"a": [1, {"b": "\x00"}]}, []],
    ],
)
def test_json_is_read_as_by_the_standard_library(value: object) -> None:
    for text in (json.dumps(value), json.dumps(value, ensure_ascii=False, indent=1)):
        assert bounded_json(text) == bounded_json(text.encode()) == json.loads(text)


def test_as_deep_as_may_be_is_read() -> None:
    for text in (nested(MOST_DEPTH), nested(MOST_DEPTH, "1")):
        assert bounded_json(text) == json.loads(text)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (nested(MOST_DEPTH + 1), "nested too deeply"),
        ('{"a": ' * 70 + "1" + "}" * 70, "nested too deeply"),
        (nested(1_000_000), "recursion limit"),
        ("[" * 1_000_000, "recursion limit"),
        ("[1e999]", "larger than any float"),
        ('{"a": -1e999}', "larger than any float"),
        ("1" + "0" * 400, "larger than any float"),
        ("1" + "0" * 5000, "out of range"),
        ("[NaN]", "expected value"),
        ("-Infinity", "line 1"),
        ('"\\ud800"', "hex escape"),
        ('"\ud800"', "surrogates not allowed"),
        (b'"\xff"', "unicode"),
        ("{} {}", "trailing characters"),
        ("", "EOF"),
    ],
)
def test_what_cannot_be_rendered_and_written_again_is_no_json(text: str | bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        bounded_json(text)


def test_a_text_that_is_too_long_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_text, "MOST_CHARACTERS", 4)
    assert bounded_json("[12]") == [12]
    with pytest.raises(ValueError, match="5 characters of JSON, must have at most 4"):
        bounded_json("[123]")
