"""The different records of a file that repeats them, such as DAPO-Math-17k: 1.8 million rows, 17 thousand problems.

Only the columns that tell problems apart are looked at row by row, and the other ones only in rows that are kept: a
minute of conversions to Python becomes seconds.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import pyarrow
import pyarrow.parquet

from goaly.prompts.blocks import FileRecord, Location, blocks_of, read_block

_BATCH_ROWS = 1 << 15


def distinct_records(file: str, columns: Sequence[str]) -> Iterator[tuple[Location, FileRecord]]:
    """The records of a file that differ in one of these columns from all before them; names may be dotted."""
    return _distinct_rows(file, columns) if file.endswith(".parquet") else _distinct_lines(file, columns)


def value_of(record: FileRecord, name: str) -> Any:
    """The value of a column, or of what a dotted name leads to in it; None if there is none."""
    if name in record:
        return record[name]
    value: Any = record
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _distinct_lines(file: str, columns: Sequence[str]) -> Iterator[tuple[Location, FileRecord]]:
    seen: set[str] = set()
    for block in blocks_of([file]):
        for location, record in read_block(block):
            key = repr([value_of(record, name) for name in columns])
            if key not in seen:
                seen.add(key)
                yield location, record


def _distinct_rows(file: str, columns: Sequence[str]) -> Iterator[tuple[Location, FileRecord]]:
    seen: set[Any] = set()
    first = 0
    with pyarrow.parquet.ParquetFile(file) as opened:
        for batch in opened.iter_batches(batch_size=_BATCH_ROWS):
            keys = [_hashable(column) for name in columns if (column := _column(batch, name)) is not None]
            for row, key in enumerate(zip(*keys, strict=True) if keys else [()] * len(batch)):
                if key not in seen:
                    seen.add(key)
                    yield Location(file, first + row), batch.slice(row, 1).to_pylist()[0]
            first += len(batch)


def _column(batch: pyarrow.RecordBatch, name: str) -> pyarrow.Array | None:
    """The column of this name, or the part of a column that a dotted name leads to."""
    if name in batch.schema.names:
        return batch.column(name)
    first, *rest = name.split(".")
    column = batch.column(first) if first in batch.schema.names else None
    for part in rest:
        if column is None or not pyarrow.types.is_struct(column.type) or column.type.get_field_index(part) < 0:
            return None
        column = column.flatten()[column.type.get_field_index(part)]
    return column


def _hashable(column: pyarrow.Array) -> list[Any]:
    """A value for each row that tells it from others: much faster than `to_pylist` for lists of structs."""
    if pyarrow.types.is_struct(column.type):
        return list(zip(*map(_hashable, column.flatten()), strict=True))
    if pyarrow.types.is_list(column.type) or pyarrow.types.is_large_list(column.type):
        offsets, values = column.offsets.to_pylist(), _hashable(column.flatten())
        start = offsets[0]  # of a slice
        return [tuple(values[one - start : end - start]) for one, end in pairwise(offsets)]
    return column.to_pylist()
