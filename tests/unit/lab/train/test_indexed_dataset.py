"""Megatron's indexed dataset files: what is written is read, Megatron reads it too, and damage is named."""

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from indexed_files import random_documents, write_dataset
from recollect.errors import DataError
from recollect.lab.train.indexed_dataset import IndexedDataset, write_indexed_dataset
from recollect.lab.train.windows import BlendedWindows, PackedDocuments, TokenWindows


@pytest.fixture
def megatron() -> None:
    pytest.importorskip("megatron.core", reason="needs megatron-core, which no test environment of ours installs")


def by_hand(prefix: Path, documents: list[list[int]], dtype: str, code: int, *, modes: bytes = b"") -> Path:
    """Write the files from the format's description, without the writer under test."""
    arrays = [np.array(ids, dtype) for ids in documents]
    lengths = [array.size for array in arrays]
    starts = [sum(array.nbytes for array in arrays[:number]) for number in range(len(arrays))]
    count = len(documents)
    Path(f"{prefix}.bin").write_bytes(b"".join(array.tobytes() for array in arrays))
    Path(f"{prefix}.idx").write_bytes(
        b"MMIDIDX\0\0"
        + struct.pack("<QBQQ", 1, code, count, count + 1)
        + struct.pack(f"<{count}i", *lengths)
        + struct.pack(f"<{count}q", *starts)
        + struct.pack(f"<{count + 1}q", *range(count + 1))
        + modes
    )
    return prefix


@pytest.mark.parametrize(
    ("dtype", "code"), [("uint8", 1), ("int8", 2), ("int16", 3), ("int32", 4), ("int64", 5), ("uint16", 8)]
)
def test_all_integer_types_are_read(tmp_path: Path, dtype: str, code: int) -> None:
    documents = [[1, 2, 3], [], [4, 100]]
    dataset = IndexedDataset(by_hand(tmp_path / "d", documents, dtype, code))
    assert [dataset[number].tolist() for number in range(len(dataset))] == documents
    assert dataset.dtype == dtype
    assert dataset.read(0, 1, 2).tolist() == [2]


@pytest.mark.parametrize(("vocab_size", "dtype"), [(256, "uint16"), (65_499, "uint16"), (65_500, "int32")])
def test_what_is_written_is_read(tmp_path: Path, vocab_size: int, dtype: str) -> None:
    documents = random_documents(count=30, vocab_size=vocab_size)
    write_indexed_dataset(tmp_path / "d", documents, vocab_size=vocab_size)
    dataset = IndexedDataset(tmp_path / "d")
    assert dataset.dtype == dtype
    assert all(np.array_equal(dataset[number], ids) for number, ids in enumerate(documents))
    assert dataset.document_indices.tolist() == list(range(31))


@pytest.mark.filterwarnings("ignore")  # theirs, about newer libraries
@pytest.mark.usefixtures("megatron")
def test_megatron_reads_the_same_and_we_read_what_it_writes(tmp_path: Path) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDataset as Theirs  # type: ignore[import-not-found]
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    documents = random_documents(count=30)
    write_indexed_dataset(tmp_path / "ours", documents, vocab_size=256)
    theirs = Theirs(str(tmp_path / "ours"))
    assert len(theirs) == 30
    assert all(np.array_equal(theirs[number], ids) for number, ids in enumerate(documents))

    torch = pytest.importorskip("torch")
    builder = IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=np.uint16)
    for ids in documents:
        builder.add_document(torch.from_numpy(ids), [len(ids)])
    builder.finalize(str(tmp_path / "theirs.idx"))
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"theirs{suffix}").read_bytes() == (tmp_path / f"ours{suffix}").read_bytes()


@pytest.mark.filterwarnings("ignore")  # theirs, about newer libraries
@pytest.mark.usefixtures("megatron")
def test_blends_take_their_turns_as_megatrons_do() -> None:
    helpers = pytest.importorskip("megatron.core.datasets.helpers")
    weights = np.array([0.55, 0.05, 0.1, 0.3])
    count = 2000
    source, place = np.zeros(count, np.int16), np.zeros(count, np.int64)
    helpers.build_blending_indices(source, place, weights, len(weights), count, False)
    streams = [np.arange(100_000 * number, 100_000 * number + count + 1) for number in range(4)]
    blended = BlendedWindows([TokenWindows(ids, seq_length=1, seed=None) for ids in streams], list(weights))
    found = [int(blended.window(index)[0]) for index in range(count)]
    assert found == [100_000 * int(s) + int(p) for s, p in zip(source, place, strict=True)]


def cut(prefix: Path, suffix: str, change: Callable[[bytes], bytes]) -> None:
    path = Path(f"{prefix}{suffix}")
    path.write_bytes(change(path.read_bytes()))


def patched(content: bytes, offset: int, value: bytes) -> bytes:
    return content[:offset] + value + content[offset + len(value) :]


@pytest.mark.parametrize(
    ("suffix", "change", "message"),
    [
        (".idx", lambda b: b"", r"corpus\.idx: got b'' at its start instead of b'MMIDIDX"),
        (".idx", lambda b: b[:20], r"corpus\.idx: got 20 bytes, expected 34: it is truncated"),
        (".idx", lambda b: b[:-1], r"corpus\.idx: got \d+ bytes, expected \d+: it is truncated\. Copy or write both"),
        (".idx", lambda b: b + b"\0", r"got \d+ bytes where 200 sequences need \d+, or \d+ with modes"),
        (
            ".idx",
            lambda b: b"TNTIDX\0\0" + b[8:],
            r"got b'TNTIDX.* instead of b'MMIDIDX.*expected an index of Megatron's",
        ),
        (".idx", lambda b: patched(b, 9, b"\2"), r"got version 2, expected 1, the only one Megatron writes"),
        (".idx", lambda b: patched(b, 17, b"\7"), r"got dtype code 7 \(float32\) where token ids are integers"),
        (".idx", lambda b: patched(b, 17, b"\x63"), r"got dtype code 99 \(unknown\) where token ids are integers"),
        (".idx", lambda b: patched(b, 18, bytes(8)), r"corpus\.idx: got no document, expected at least one"),
        (".idx", lambda b: patched(b, 18, b"\xff" * 8), r"expected \d+: it is truncated"),
        (".idx", lambda b: patched(b, 34, b"\xff" * 4), r"got lengths or positions below 0"),
        (".idx", lambda b: b[:-8] + bytes(8), r"got documents that do not go from sequence 0 to 200"),
        (
            ".bin",
            lambda b: b[:-2],
            r"got \d+ bytes in corpus\.bin, expected \d+ as corpus\.idx says: it is truncated, or",
        ),
        (".bin", lambda b: b + b"\0\0", r"it is longer than its index says, or the files do not match"),
    ],
)
def test_damage_is_named(tmp_path: Path, suffix: str, change: Callable[[bytes], bytes], message: str) -> None:
    prefix = write_dataset(tmp_path)
    cut(prefix, suffix, change)
    with pytest.raises(DataError, match=message):
        IndexedDataset(prefix)


def test_any_changed_byte_of_the_index_is_an_error_or_harmless(tmp_path: Path) -> None:
    prefix = write_dataset(tmp_path, count=10)
    path = Path(f"{prefix}.idx")
    content = path.read_bytes()
    for offset in range(len(content)):
        path.write_bytes(patched(content, offset, bytes([content[offset] ^ 0x80])))
        try:
            dataset = IndexedDataset(prefix)
            _ = [dataset[number].sum() for number in range(len(dataset))]
        except DataError:
            continue


def test_missing_files_and_names_of_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none: no file .*none\.idx, expected a pair of \.bin and \.idx"):
        IndexedDataset(tmp_path / "none")
    prefix = write_dataset(tmp_path)
    with pytest.raises(DataError, match=r"got the name of a file, expected the common prefix .* Use .*corpus\.$"):
        IndexedDataset(Path(f"{prefix}.bin"))
    Path(f"{prefix}.bin").unlink()
    with pytest.raises(DataError, match=r"no file .*corpus\.bin"):
        IndexedDataset(prefix)


def test_what_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"document 1: got token id 9, expected 0 to 8"):
        write_indexed_dataset(tmp_path / "d", [[1], [2, 9]], vocab_size=9)
    with pytest.raises(DataError, match=r"document 0: got token id -1, expected 0 to 8"):
        write_indexed_dataset(tmp_path / "d", [[-1]], vocab_size=9)
    with pytest.raises(DataError, match="got no document, expected at least one"):
        write_indexed_dataset(tmp_path / "d", [], vocab_size=9)
    with pytest.raises(DataError, match=r"none/d: cannot be written \(No such file"):
        write_indexed_dataset(tmp_path / "none" / "d", [[1]], vocab_size=9)
    assert list(tmp_path.iterdir()) == []


def packed(prefix: Path, *, seed: int | None, seq_length: int = 16, vocab_size: int = 256) -> PackedDocuments:
    dataset = IndexedDataset(prefix)
    return PackedDocuments(dataset, (0, len(dataset)), seq_length=seq_length, seed=seed, vocab_size=vocab_size)


def test_windows_are_the_documents_end_to_end(tmp_path: Path) -> None:
    prefix = write_dataset(tmp_path)
    stream = np.concatenate(random_documents(count=200))
    windows = packed(prefix, seed=None)
    assert windows.num_tokens == stream.size
    assert windows.num_windows == (stream.size - 1) // 16
    for index in range(windows.num_windows):
        assert np.array_equal(windows.window(index), stream[16 * index : 16 * index + 17])
    assert np.array_equal(windows.window(windows.num_windows), stream[:17])  # the next epoch


def test_each_token_comes_once_an_epoch_and_documents_change_their_neighbours(tmp_path: Path) -> None:
    prefix = tmp_path / "d"
    documents = [np.full(5, number) for number in range(100)]
    write_indexed_dataset(prefix, documents, vocab_size=100)
    windows = packed(prefix, seed=3, seq_length=10)
    epochs = []
    for epoch in range(2):
        rows = [windows.window(epoch * windows.num_windows + index)[:-1] for index in range(windows.num_windows)]
        counts = np.bincount(np.concatenate(rows), minlength=100)
        assert counts.max() == 5
        assert counts.sum() == 10 * windows.num_windows == 490
        epochs.append({tuple(sorted(set(row.tolist()))) for row in rows})
    assert len(epochs[0] & epochs[1]) < 5  # of 49 sets of neighbours; 490 of 4950 pairs are met by chance


def test_an_id_outside_of_the_vocabulary_is_named(tmp_path: Path) -> None:
    prefix = tmp_path / "d"
    write_indexed_dataset(prefix, [[1, 2, 200, 3]], vocab_size=256)
    assert packed(prefix, seed=None, seq_length=3, vocab_size=201).window(0).tolist() == [1, 2, 200, 3]
    with pytest.raises(DataError, match=r"got token id 200, expected 0 to 199\. Give the --vocab-size or --tokenizer"):
        packed(prefix, seed=None, seq_length=3, vocab_size=200).window(0)
    by_hand(prefix, [[1, -2, 3, 4]], "int32", 4)
    with pytest.raises(DataError, match=r"got token id -2, expected 0 to 99"):
        packed(prefix, seed=None, seq_length=3, vocab_size=100).window(0)


def test_a_blend_keeps_to_its_shares_and_goes_through_each_source_in_order() -> None:
    sources = [TokenWindows(np.full(1 + 5 * (number + 1), number), seq_length=1, seed=None) for number in range(3)]
    blended = BlendedWindows(sources, [3.0, 1.0, 2.0])
    taken = np.array([int(blended.window(index)[0]) for index in range(3000)])
    shares = np.array([[3], [1], [2]]) / 6
    counts = np.array([(taken == number).cumsum() for number in range(3)])
    assert np.abs(counts - shares * np.arange(1, 3001)).max() <= 1  # windows
    assert int(BlendedWindows(sources, [1.0, 3.0, 2.0]).window(0)[0]) == 1  # the largest share comes first
    other = BlendedWindows(sources, [3.0, 1.0, 2.0])
    assert int(other.window(2999)[0]) == taken[2999]
