"""In: the path of a Parquet file, an Arrow file or an Arrow stream. Out: the text of each row, in blocks.
Does not read other columns, and holds few rows at a time. Does not import pyarrow before such a file is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from codescent.base.errors import UserError
from codescent.base.extra import library
from codescent.data.text.forms import ARROW_STREAM, PARQUET
from codescent.data.text.records import NULL_TYPE, TEXT_TYPE, DocumentPiece, Reading, blocks_of, text_column

BATCH_BYTES = 1 << 20
"""Rows are converted in batches of about so many bytes."""
_MOST_ROWS = 128  # of equal texts a Parquet file holds one, and a batch each of them
_NO_MORE = bytes(4)  # an Arrow stream ends with a message of length 0


def columnar_documents(
    path: Path, form: str, reading: Reading, advance: Callable[[float], None]
) -> Iterator[DocumentPiece]:
    """The text of the rows, in the order of the file.

    Args:
        form: PARQUET, ARROW_FILE or ARROW_STREAM.
        advance: called with the share of the file that has been read, from 0 to 1.

    Raises:
        UserError: the file is damaged (in which row group or record batch); pyarrow is not installed; no column of
            strings, or several (`text_column`).
    """
    pyarrow = needed(form)
    with _damage(str(path), pyarrow), pyarrow.OSFile(str(path)) as file:
        if form == PARQUET:
            yield from _parquet(path, file, pyarrow, reading, advance)
        elif form == ARROW_STREAM:
            yield from _arrow_stream(path, file, pyarrow, reading, advance)
        else:
            yield from _arrow_file(path, file, pyarrow, reading, advance)


def needed(form: str) -> Any:
    """The library that reads such a file, pyarrow. Raises UserError: it is not installed."""
    return library("pyarrow", "Parquet" if form == PARQUET else "Arrow", "parquet")


def _parquet(
    path: Path, file: Any, pyarrow: Any, reading: Reading, advance: Callable[[float], None]
) -> Iterator[DocumentPiece]:
    parquet = library("pyarrow.parquet", "Parquet", "parquet")
    # with `buffer_size` and without `pre_buffer` the pages of a column are read one after another, not as a whole
    table = parquet.ParquetFile(file, buffer_size=BATCH_BYTES, pre_buffer=False, page_checksum_verification=True)
    name, facts = _column(path, table.schema_arrow, pyarrow, reading), table.metadata
    for number in range(facts.num_row_groups):
        group = facts.row_group(number)
        # of all columns: damaged facts of one column end the process in pyarrow, without an exception
        rows = _rows_at_once(group.num_rows, group.total_byte_size)
        where, found = f"{path}: row group {number + 1} of {facts.num_row_groups}", 0
        with _damage(where, pyarrow):
            for batch in table.iter_batches(rows, row_groups=[number], columns=[name], use_threads=False):
                yield from _texts(batch.column(0), reading)
                found += len(batch)
        if found != group.num_rows:
            raise UserError(f"{where}: damaged: {found} rows, and its footer says {group.num_rows}")
        advance((number + 1) / facts.num_row_groups)


def _arrow_file(
    path: Path, file: Any, pyarrow: Any, reading: Reading, advance: Callable[[float], None]
) -> Iterator[DocumentPiece]:
    schema = pyarrow.ipc.open_file(file).schema
    options = _only(schema, _column(path, schema, pyarrow, reading), pyarrow)
    table = pyarrow.ipc.open_file(file, options=options)
    for number in range(table.num_record_batches):
        with _damage(f"{path}: record batch {number + 1} of {table.num_record_batches}", pyarrow):
            yield from _texts(table.get_batch(number).column(0), reading)
        advance((number + 1) / table.num_record_batches)


def _arrow_stream(
    path: Path, file: Any, pyarrow: Any, reading: Reading, advance: Callable[[float], None]
) -> Iterator[DocumentPiece]:
    size_bytes = file.size()
    file.seek(max(0, size_bytes - len(_NO_MORE)))
    if file.read() != _NO_MORE:
        raise UserError(f"{path}: damaged or cut short: an Arrow stream ends with four bytes of 0")
    file.seek(0)
    schema = pyarrow.ipc.open_stream(file).schema
    options = _only(schema, _column(path, schema, pyarrow, reading), pyarrow)
    file.seek(0)
    table, number = pyarrow.ipc.open_stream(file, options=options), 0
    while True:
        number += 1
        with _damage(f"{path}: record batch {number}", pyarrow):
            try:
                batch = table.read_next_batch()
            except StopIteration:
                return
            yield from _texts(batch.column(0), reading)
        advance(file.tell() / size_bytes)


def _only(schema: Any, name: str, pyarrow: Any) -> Any:
    return pyarrow.ipc.IpcReadOptions(included_fields=[schema.get_field_index(name)])


def _column(path: Path, schema: Any, pyarrow: Any, reading: Reading) -> str:
    """The column of the text. Raises UserError: see `text_column`; or two columns have its name."""
    name = text_column(str(path), {item.name: _kind(item.type, pyarrow) for item in schema}, reading, "column")
    if (times := schema.names.count(name)) > 1:
        raise UserError(f'{path}: {times} columns are named "{name}": name each of them differently')
    return name


def _kind(kind: Any, pyarrow: Any) -> str:
    """The type of a column as `text_column` names it."""
    types = pyarrow.types
    values = kind.value_type if types.is_dictionary(kind) else kind
    if types.is_string(values) or types.is_large_string(values) or types.is_string_view(values):
        return TEXT_TYPE
    return NULL_TYPE if types.is_null(values) else str(kind)


def _texts(column: Any, reading: Reading) -> Iterator[DocumentPiece]:
    """The values of a column as documents. Raises errors of pyarrow: damaged offsets, or not UTF-8."""
    column.validate(full=True)
    rows = _rows_at_once(len(column), column.nbytes)
    for start in range(0, len(column), rows):
        for text in column.slice(start, rows).to_pylist():
            yield from blocks_of(text, reading.noticed)


def _rows_at_once(num_rows: int, num_bytes: int) -> int:
    return max(1, min(_MOST_ROWS, BATCH_BYTES * num_rows // max(num_bytes, 1)))


@contextmanager
def _damage(where: str, pyarrow: Any) -> Iterator[None]:
    """Errors of pyarrow as UserError. An OSError that the system numbered is not of pyarrow."""
    try:
        yield
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        reason = " ".join(str(error).split())
        raise UserError(f"{where}: damaged or cut short: {reason}") from error
