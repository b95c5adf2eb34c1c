"""Training data: documents packed into rows of tokens, in an order that a seed decides, through Grain.

All documents lie one after the other, and a row is the next `seq_len` tokens of them. A document that does not fit into
a row continues in another row, without what it saw before. No token is dropped, and only the last row has padding.
"""

import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np

from tilewright.models.train_config import DataTable, TrainConfigError

IGNORED_LABEL = -100
_SCANNED = 2**24  # Tokens that are looked at in one piece, so that a mapped file is never in memory as a whole.


@dataclass(frozen=True)
class Documents:
    """Documents, one after the other."""

    tokens: np.ndarray  # [N] integers
    starts: np.ndarray  # Where each document begins, ascending from 0.
    checksum: int

    @staticmethod
    def read(table: DataTable, vocab_size: int) -> "Documents":
        """Reads and checks what the `[data]` table names."""
        tokens, starts = _from_array(table) if table.tokens is not None else _from_text(table)
        name, checksum = table.tokens or table.text[0], 0
        for begin in range(0, tokens.size, _SCANNED):
            piece = np.ascontiguousarray(tokens[begin : begin + _SCANNED])
            checksum = zlib.crc32(piece, checksum)
            low, high = int(piece.min()), int(piece.max())
            if low < 0 or high >= vocab_size:
                found = low if low < 0 else high
                raise TrainConfigError(
                    f"[data] {name} has token {found}, and the model's vocabulary has {vocab_size}, 0 to {vocab_size - 1}"
                )
        if tokens.size - starts.size < 1:
            raise TrainConfigError(f"[data] {name} has no document of two tokens or more; there is nothing to predict")
        return Documents(tokens, starts, checksum)


def _from_text(table: DataTable) -> tuple[np.ndarray, np.ndarray]:
    encode = _encoder(table.tokenizer)
    end = [] if table.end_of_document is None else [table.end_of_document]
    pieces: list[np.ndarray] = []
    for path in table.text:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise TrainConfigError(f"[data] {path} cannot be read as UTF-8 text: {error}") from error
        for document in text.split(table.separator) if table.separator else [text]:
            if document:
                pieces.append(np.concatenate([encode(document), np.array(end, np.int32)]))
    if not pieces:
        raise TrainConfigError(f"[data] {table.text[0]} is empty")
    lengths = [piece.size for piece in pieces]
    return np.concatenate(pieces), np.cumsum([0, *lengths[:-1]])


def _encoder(tokenizer: str) -> Any:
    if tokenizer == "bytes":
        return lambda text: np.frombuffer(text.encode(), np.uint8).astype(np.int32)
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise TrainConfigError(f"tokenizer={tokenizer!r} needs tokenizers: pip install 'tilewright[models]'") from None
    if not Path(tokenizer).is_file():
        raise TrainConfigError(f"[data] tokenizer: {tokenizer} does not exist; use a tokenizer.json, or 'bytes'")
    try:
        loaded = Tokenizer.from_file(tokenizer)
    except Exception as error:  # The library raises Exception itself.
        raise TrainConfigError(f"[data] tokenizer: {tokenizer} is not a tokenizer.json: {error}") from error
    return lambda text: np.array(loaded.encode(text).ids, np.int32)


def _from_array(table: DataTable) -> tuple[np.ndarray, np.ndarray]:
    try:
        tokens = np.load(str(table.tokens), mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise TrainConfigError(f"[data] {table.tokens} cannot be read as a .npy file: {error}") from error
    if not isinstance(tokens, np.ndarray) or tokens.ndim != 1 or tokens.dtype.kind not in "iu" or not tokens.size:
        raise TrainConfigError(f"[data] {table.tokens} must be a one-dimensional array of integers, and not empty")
    starts = [np.zeros(1, np.int64)]
    if table.end_of_document is not None:
        for begin in range(0, tokens.size, _SCANNED):
            starts.append(np.flatnonzero(tokens[begin : begin + _SCANNED] == table.end_of_document) + begin + 1)
    joined = np.concatenate(starts)
    return tokens, joined[joined < tokens.size]


class Rows:
    """Rows of `seq_len` tokens as Grain reads them: by number."""

    def __init__(self, documents: Documents, seq_len: int):
        self._documents, self._seq_len = documents, seq_len

    def __len__(self) -> int:
        return -(-self._documents.tokens.size // self._seq_len)

    def __getitem__(self, index: SupportsIndex) -> dict[str, np.ndarray]:
        """`ids` [T]; `labels` [T], the next token, or -100 at the end of a document and in padding; and `segment_ids` [T],
        which count the documents of a row from 1, and are 0 in padding.
        """
        tokens, starts = self._documents.tokens, self._documents.starts
        first = index.__index__() * self._seq_len
        found = np.asarray(tokens[first : first + self._seq_len + 1], np.int32)
        places = first + np.arange(found.size)
        document = np.searchsorted(starts, places, side="right")
        count = min(found.size, self._seq_len)
        row = {
            "ids": np.zeros(self._seq_len, np.int32),
            "labels": np.full(self._seq_len, IGNORED_LABEL, np.int32),
            "segment_ids": np.zeros(self._seq_len, np.int32),
        }
        row["ids"][:count] = found[:count]
        row["segment_ids"][:count] = document[:count] - document[0] + 1
        labelled = found.size - 1
        row["labels"][:labelled] = np.where(document[1:] == document[:-1], found[1:], IGNORED_LABEL)
        return row


def batches(documents: Documents, seq_len: int, rows: int, seed: int) -> Any:
    """An endless Grain iterator of batches of `rows` rows: every row once per epoch, each epoch in an order of its own.

    `get_state` and `set_state` of the iterator say which batch comes next.
    """
    import grain

    dataset = grain.MapDataset.source(Rows(documents, seq_len)).seed(seed).shuffle().repeat().batch(rows)
    return iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=2, prefetch_buffer_size=4)))
