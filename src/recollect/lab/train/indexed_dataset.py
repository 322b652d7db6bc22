"""Read and write Megatron's indexed dataset: token ids in `PREFIX.bin`, their index in `PREFIX.idx`, both memory-mapped.

The index, little-endian (Megatron-LM, megatron/core/datasets/indexed_dataset.py):

    9 bytes   b"MMIDIDX", two zeros
    uint64    version, 1
    uint8     code of the ids' dtype
    uint64    n, number of sequences
    uint64    m, number of document indices: one more than the documents
    int32[n]  ids in each sequence
    int64[n]  offset of each sequence in the .bin, in bytes
    int64[m]  first sequence of each document, then n
    int8[n]   mode of each sequence, which is not read; in multimodal files only

Files for language models have one sequence per document.
"""

import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import ArrayLike, NDArray

from recollect.errors import DataError
from recollect.lab.train.files import write_atomically

_MAGIC = b"MMIDIDX\0\0"
_VERSION = 1
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32", 8: "uint16"}
_UINT16_IDS = 65_500  # Megatron writes uint16 below this many ids, else int32


class IndexedDataset:
    """The documents of a pair of files, `prefix.bin` and `prefix.idx`; opening them reads no tokens.

    Attributes:
        lengths: ids in each sequence.
        document_indices: first sequence of each document, then the number of sequences.
    """

    def __init__(self, prefix: Path) -> None:
        if prefix.suffix in (".bin", ".idx") and prefix.is_file():
            raise DataError(
                f"indexed dataset {prefix}: got the name of a file, expected the common prefix of both files. "
                f"Use {prefix.with_suffix('')}."
            )
        self.prefix = prefix
        index, data = index_path(prefix), data_path(prefix)
        for path in (index, data):
            if not path.is_file():
                raise DataError(
                    f"indexed dataset {prefix}: no file {path}, expected a pair of .bin and .idx as Megatron's "
                    f"tools/preprocess_data.py or `recollect tokenize` writes it. Check --data-path."
                )
        dtype, sequences, documents = _read_header(index)
        self.dtype: np.dtype[Any] = np.dtype(dtype)
        raw = np.memmap(index, np.uint8, "r")
        _check_size(index, raw.size, sequences, documents)
        offset = _HEADER.size
        self.lengths: NDArray[np.int32] = np.frombuffer(raw, "<i4", sequences, offset)
        offset += self.lengths.nbytes
        self._pointers: NDArray[np.int64] = np.frombuffer(raw, "<i8", sequences, offset)
        offset += self._pointers.nbytes
        self.document_indices: NDArray[np.int64] = np.frombuffer(raw, "<i8", documents, offset)
        self._check_entries()
        self._data = np.memmap(data, np.uint8, "r")

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, sequence: int) -> NDArray[Any]:
        return self.read(sequence, 0, int(self.lengths[sequence]))

    def read(self, sequence: int, start: int, stop: int) -> NDArray[Any]:
        """Return ids `start` to `stop` of a sequence, without a copy; both must be within its length."""
        offset = int(self._pointers[sequence]) + start * self.dtype.itemsize
        return np.frombuffer(self._data, self.dtype, stop - start, offset)

    def _check_entries(self) -> None:
        size = data_path(self.prefix).stat().st_size
        ends = self._pointers + self.lengths.astype(np.int64) * self.dtype.itemsize
        if self.lengths.min() < 0 or self._pointers.min() < 0:
            raise _foreign(index_path(self.prefix), "lengths or positions below 0")
        if (
            not np.array_equal(self.document_indices[[0, -1]], (0, len(self)))
            or (np.diff(self.document_indices) < 0).any()
        ):
            raise _foreign(index_path(self.prefix), f"documents that do not go from sequence 0 to {len(self)}")
        if ends.max() != size:
            what = "truncated" if size < ends.max() else "longer than its index says"
            raise DataError(
                f"indexed dataset {self.prefix}: got {size} bytes in {data_path(self.prefix).name}, expected {ends.max()} as "
                f"{index_path(self.prefix).name} says: it is {what}, or the files do not match. Copy or write both again."
            )


def write_indexed_dataset(prefix: Path, documents: Iterable[ArrayLike], *, vocab_size: int) -> None:
    """Write documents as `PREFIX.bin` and `PREFIX.idx` in an existing folder, which Megatron reads too.

    Documents are consumed one by one, so they need not fit into memory together. All ids are below `vocab_size`, which decides
    whether they are written as uint16 or int32.
    """
    dtype = np.dtype("<u2" if vocab_size < _UINT16_IDS else "<i4")
    lengths: list[int] = []

    def write_data(file: BinaryIO) -> None:
        for number, document in enumerate(documents):
            ids = np.asarray(document, np.int64)
            if ids.size and not 0 <= ids.min() <= ids.max() < vocab_size:
                wrong = int(ids.min() if ids.min() < 0 else ids.max())
                raise DataError(
                    f"document {number}: got token id {wrong}, expected 0 to {vocab_size - 1}. Correct vocab_size or the ids."
                )
            file.write(ids.astype(dtype).tobytes())
            lengths.append(ids.size)
        if not lengths:
            raise DataError(f"indexed dataset {prefix}: got no document, expected at least one.")

    def write_index(file: BinaryIO) -> None:
        code = next(code for code, name in _DTYPES.items() if np.dtype(name) == dtype)
        counts = np.array(lengths, np.int64)
        file.write(_HEADER.pack(_MAGIC, _VERSION, code, counts.size, counts.size + 1))
        file.write(counts.astype("<i4").tobytes())
        file.write(((counts.cumsum() - counts) * dtype.itemsize).astype("<i8").tobytes())
        file.write(np.arange(counts.size + 1, dtype="<i8").tobytes())

    try:
        write_atomically(data_path(prefix), write_data)
        write_atomically(index_path(prefix), write_index)
    except OSError as problem:
        raise DataError(
            f"indexed dataset {prefix}: cannot be written ({problem.strerror}), expected a writable folder."
        ) from None


def index_path(prefix: Path) -> Path:
    return Path(f"{prefix}.idx")


def data_path(prefix: Path) -> Path:
    return Path(f"{prefix}.bin")


def _read_header(path: Path) -> tuple[str, int, int]:
    """Return dtype, number of sequences and number of document indices."""
    with path.open("rb") as file:
        header = file.read(_HEADER.size)
    if not header.startswith(_MAGIC):
        raise _foreign(path, f"{header[: len(_MAGIC)]!r} at its start instead of {_MAGIC!r}")
    if len(header) < _HEADER.size:
        raise _truncated(path, len(header), _HEADER.size)
    _, version, code, sequences, documents = _HEADER.unpack(header)
    if version != _VERSION:
        raise DataError(
            f"index {path}: got version {version}, expected {_VERSION}, the only one Megatron writes. "
            f"Write the dataset again."
        )
    dtype = _DTYPES.get(code)
    if dtype is None or dtype.startswith("float"):
        raise _foreign(path, f"dtype code {code} ({dtype or 'unknown'}) where token ids are integers")
    if sequences == 0 or documents == 0:
        raise DataError(f"index {path}: got no document, expected at least one. Write the dataset again.")
    return dtype, sequences, documents


def _check_size(path: Path, size: int, sequences: int, documents: int) -> None:
    without = _HEADER.size + sequences * (4 + 8) + documents * 8
    if size < without:
        raise _truncated(path, size, without)
    if size not in (without, without + sequences):
        raise _foreign(
            path, f"{size} bytes where {sequences} sequences need {without}, or {without + sequences} with modes"
        )


def _truncated(path: Path, size: int, expected: int) -> DataError:
    return DataError(
        f"index {path}: got {size} bytes, expected {expected}: it is truncated. Copy or write both files again."
    )


def _foreign(path: Path, got: str) -> DataError:
    return DataError(
        f"index {path}: got {got}, expected an index of Megatron's indexed dataset. Check --data-path, or write it again "
        f"with tools/preprocess_data.py or `recollect tokenize`."
    )


def content_samples(dataset: IndexedDataset, *, block_bytes: int = 1 << 16, blocks: int = 64) -> Iterable[bytes]:
    """Yield samples that tell two datasets apart without reading a large one in full: the index, and blocks of ids."""
    yield index_path(dataset.prefix).read_bytes()
    path = data_path(dataset.prefix)
    size = path.stat().st_size
    with path.open("rb") as file:
        for start in sorted({max(0, (size - block_bytes) * block // max(1, blocks - 1)) for block in range(blocks)}):
            file.seek(start)
            yield file.read(block_bytes)
