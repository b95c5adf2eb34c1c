"""Checkpoints in the safetensors format, read tensor by tensor and written the same way.

A file is an 8-byte length, a JSON header with each tensor's dtype, shape and place, and the tensors' bytes. Reading maps
the file into memory, so a tensor occupies memory only while it is used. Nothing in a checkpoint is ever executed.
"""

import json
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

_DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_LENGTH = struct.Struct("<Q")
_LARGEST_HEADER = 100 * 2**20

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


class CheckpointError(ValueError):
    """A checkpoint that cannot be read. The text names the file, tensor, key or number."""


class SafetensorsFile:
    """The tensors of one file."""

    def __init__(self, path: Path):
        self.path = path
        try:
            size = path.stat().st_size
            with path.open("rb") as file:
                head = file.read(_LENGTH.size)
                length = _LENGTH.unpack(head)[0] if len(head) == _LENGTH.size else -1
                if not 0 < length <= min(size, _LARGEST_HEADER):
                    raise CheckpointError(f"{path} is not a safetensors file, or is cut off: it has {size} bytes")
                header = json.loads(file.read(length))
        except FileNotFoundError:
            raise CheckpointError(f"{path} does not exist; download the whole checkpoint") from None
        except (OSError, ValueError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{path} cannot be read as safetensors: {error}") from error
        if not isinstance(header, dict):
            raise CheckpointError(f"{path} is not a safetensors file: its header is a {type(header).__name__}")
        self._start = _LENGTH.size + length
        told = header.get("__metadata__")
        self.metadata: dict[str, Any] = told if isinstance(told, dict) else {}
        self.tensors: dict[str, tuple[np.dtype, tuple[int, ...], int]] = {}
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            self.tensors[name] = self._entry(name, entry, size)
        self._bytes = np.memmap(path, np.uint8, "r") if size else np.zeros(0, np.uint8)

    def _entry(self, name: str, entry: Any, size: int) -> tuple[np.dtype, tuple[int, ...], int]:
        try:
            dtype, shape = _DTYPES[entry["dtype"]], tuple(map(int, entry["shape"]))
            begin, end = map(int, entry["data_offsets"])
            if any(size < 0 for size in shape):
                raise ValueError
        except (KeyError, TypeError, ValueError):
            raise CheckpointError(
                f"{self.path}: the header's entry for {name!r} is {entry!r}, which is no tensor"
            ) from None
        count = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if end - begin != count or begin < 0:
            raise CheckpointError(f"{self.path}: {name!r} of {list(shape)} needs {count} bytes and has {end - begin}")
        if self._start + end > size:
            raise CheckpointError(
                f"{self.path} is cut off: {name!r} ends at byte {self._start + end} and the file has {size}; download it "
                f"again"
            )
        return dtype, shape, begin

    def read(self, name: str) -> np.ndarray:
        dtype, shape, begin = self.tensors[name]
        count = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        first = self._start + begin
        # A copy where the place is not aligned to the dtype; otherwise a view of the mapped file.
        return np.frombuffer(self._bytes[first : first + count].tobytes(), dtype).reshape(shape)


class Checkpoint(Mapping[str, np.ndarray]):
    """The tensors of a folder with model.safetensors or a sharded index, by name. A tensor is read when it is asked for."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise CheckpointError(f"{self.folder} is not a folder; pass the one that has config.json and {SINGLE}")
        self._where: dict[str, SafetensorsFile] = {}
        if (self.folder / SINGLE).exists():  # Before the index, as transformers has it: `Model.save` writes this one.
            file = SafetensorsFile(self.folder / SINGLE)
            self._where = dict.fromkeys(file.tensors, file)
        elif (self.folder / INDEX).exists():
            self._read_index()
        else:
            raise CheckpointError(f"{self.folder} has neither {SINGLE} nor {INDEX}; only safetensors are read")
        self.read: set[str] = set()
        """The names that were asked for."""

    def _read_index(self) -> None:
        path = self.folder / INDEX
        try:
            of = json.loads(path.read_text())["weight_map"]
            names = sorted(set(of.values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path} has no weight_map that can be read: {error!r}") from error
        for name in names:
            if Path(name).name != name:
                raise CheckpointError(f"{path} names the file {name!r}; files must lie beside the index")
        files = {name: SafetensorsFile(self.folder / name) for name in names}
        for tensor, name in of.items():
            if tensor not in files[name].tensors:
                raise CheckpointError(f"{path} says that {name} has {tensor!r}, and it has not; download it again")
            self._where[tensor] = files[name]

    def __getitem__(self, name: str) -> np.ndarray:
        self.read.add(name)
        dtype = self._where[name].tensors[name][0]
        if dtype.kind in "iub":
            raise CheckpointError(
                f"{self._where[name].path}: {name!r} is of {dtype}, and weights are floating-point numbers; a checkpoint "
                f"that is quantised has to be converted to bfloat16 first"
            )
        return self._where[name].read(name)

    def __contains__(self, name: object) -> bool:
        return name in self._where

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._where[name].tensors[name][1]

    def unread(self) -> list[str]:
        """The names that nobody asked for."""
        return sorted(set(self._where) - self.read)


def write(
    path: Path,
    shapes: Mapping[str, tuple[Any, tuple[int, ...]]],
    tensors: Iterable[tuple[str, Any]],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes a safetensors file. `shapes` has the dtype and shape of each tensor; `tensors` come in the same order, one at
    a time. The file appears under its name when it is whole.
    """
    if path.is_dir():
        raise CheckpointError(f"{path} is a folder; give the name of a file in it")
    path.parent.mkdir(parents=True, exist_ok=True)
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    offset = 0
    for name, (dtype, shape) in shapes.items():
        size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        header[name] = {"dtype": _NAMES[np.dtype(dtype)], "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    unfinished = path.with_suffix(".unfinished")
    with unfinished.open("wb") as file:
        file.write(_LENGTH.pack(len(text)))
        file.write(text)
        for expected, (name, tensor) in zip(shapes, tensors, strict=True):
            dtype, shape = shapes[expected]
            array = np.ascontiguousarray(np.asarray(tensor)).astype(np.dtype(dtype), copy=False)
            if name != expected or array.shape != tuple(shape):
                raise ValueError(f"{name} of {array.shape} came where {expected} of {shape} was to be written")
            file.write(array.tobytes())
    unfinished.replace(path)
