"""Files read by blocks: every record once a pass, exact resuming (prompts-3), constant memory, places in errors."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from goaly.prompts import blocks
from goaly.prompts.blocks import Block, Location, ShuffledFiles, blocks_of, fingerprint_of, read_block


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 64 bytes, two to a pool: a file of a page has many pools."""
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 64)
    monkeypatch.setattr(blocks, "POOL_BLOCKS", 2)


def write_lines(path: Path, texts: list[str]) -> str:
    path.write_text("".join(json.dumps({"prompt": text, "number": n}) + "\n" for n, text in enumerate(texts)))
    return str(path)


def numbers_of(block: Block) -> list[int]:
    return [record["number"] for _, record in read_block(block)]


def numbers(*files: str, passes: int | None = 1, order: str = "0") -> ShuffledFiles[int]:
    return ShuffledFiles(blocks_of(files), numbers_of, order=order, passes=passes)


def taken(node: Iterator[int], count: int) -> list[int]:
    return list(itertools.islice(node, count))


@given(lengths=st.lists(st.integers(0, 200), max_size=30), block=st.integers(1, 90))
def test_every_line_is_in_one_block_whatever_its_length(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], block: int
) -> None:
    file = write_lines(tmp_path_factory.mktemp("lines") / "a.jsonl", ["é" * length for length in lengths])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "BLOCK_BYTES", block)
        found = [(str(place), record) for one in blocks_of([file]) for place, record in read_block(one)]
    assert [record["number"] for _, record in found] == list(range(len(lengths)))
    assert [place for place, _ in found] == [f"{file}, line {n + 1}" for n in range(len(lengths))]


def test_blank_lines_count_in_places_and_give_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('\n{"prompt": "1"}\n\n \n{"prompt": "2"}')
    found = [str(place) for block in blocks_of([str(path)]) for place, _ in read_block(block)]
    assert found == [f"{path}, line 2", f"{path}, line 5"]


@pytest.mark.usefixtures("small_blocks")
def test_a_pass_gives_every_record_once_and_the_next_pass_in_another_order(tmp_path: Path) -> None:
    lines = write_lines(tmp_path / "a.jsonl", [str(n) for n in range(50)])
    table = pyarrow.Table.from_pylist([{"number": n} for n in range(50, 80)])
    pyarrow.parquet.write_table(table, tmp_path / "b.parquet", row_group_size=7)
    node = numbers(lines, str(tmp_path / "b.parquet"), passes=2)
    first, second = taken(node, 80), list(node)
    assert sorted(first) == sorted(second) == list(range(80))
    assert first != second != sorted(second)
    assert all({n < 50 for n in one[:40]} == {True, False} for one in (first, second)), "both files are mixed"


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("before", [0, 1, 7, 8, 9, 49, 50, 51, 120])
def test_a_resumed_node_gives_the_items_that_would_have_come(tmp_path: Path, before: int) -> None:
    file = write_lines(tmp_path / "a.jsonl", [str(n) for n in range(50)])
    node, resumed = numbers(file, passes=None), numbers(file, passes=None)
    taken(node, before)
    resumed.reset(json.loads(json.dumps(node.state_dict())))
    assert taken(node, 70) == taken(resumed, 70)


def test_the_order_depends_on_the_seed(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "a.jsonl", [str(n) for n in range(50)])
    assert list(numbers(file, order="0")) == list(numbers(file, order="0")) != list(numbers(file, order="1"))


def test_a_pass_without_items_ends_the_node(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "a.jsonl", ["1", "2"])
    with pytest.raises(StopIteration):
        next(ShuffledFiles(blocks_of([file]), lambda block: [], order="0"))


@pytest.mark.usefixtures("small_blocks")
def test_a_bad_line_far_into_a_file_is_named_without_a_traceback(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "a.jsonl", [str(n) for n in range(50)])
    with open(file, "a") as lines:
        lines.write("{\n")
    with pytest.raises(ValueError, match=r"a\.jsonl, line 51: not JSON") as caught:
        list(numbers(file))
    assert "Traceback" not in str(caught.value)


@pytest.mark.usefixtures("small_blocks")
def test_no_more_than_a_few_pools_are_read_ahead(tmp_path: Path) -> None:
    file, read = write_lines(tmp_path / "a.jsonl", [str(n) for n in range(1000)]), []
    node = ShuffledFiles(
        blocks_of([file]), lambda block: read.extend(found := numbers_of(block)) or found, order="0", passes=1
    )
    ahead = [len(read) - given for given, _ in enumerate(node, start=1)]
    assert len(ahead) == 1000
    assert max(ahead) <= 30  # a pool of two blocks has some five of these lines


def test_the_fingerprint_tells_names_sizes_and_both_ends(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    seen = set()
    for text in ("1" * 300_000, "2" + "1" * 299_999, "1" * 299_999 + "2", "1" * 300_001):
        path.write_text(text)
        seen.add(fingerprint_of([str(path)]))
    (tmp_path / "b.jsonl").write_text(text)
    seen.add(fingerprint_of([str(tmp_path / "b.jsonl")]))
    assert len(seen) == 5


def test_a_row_of_a_parquet_file_is_named_by_its_number_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"number": n} for n in range(9)]), path, row_group_size=4)
    places = [place for block in blocks_of([str(path)]) for place, _ in read_block(block)]
    assert places == [Location(str(path), n) for n in range(9)]
    assert str(places[5]) == f"{path}, row 5"
