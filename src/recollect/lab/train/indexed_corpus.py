"""Open indexed datasets as Megatron's data flags describe them: prefixes with weights, and a split."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from recollect.errors import DataError
from recollect.lab.train.config import DataFlags
from recollect.lab.train.indexed_dataset import IndexedDataset, content_samples
from recollect.lab.train.windows import BlendedWindows, PackedDocuments, Windows

__all__ = ["IndexedWindows", "load_indexed_windows", "parse_blend", "parse_split"]

_SIDES = ("training", "validation", "test")


@dataclass(frozen=True, slots=True, eq=False)
class IndexedWindows:
    """Windows of a run's indexed data.

    Attributes:
        training: packed documents, shuffled.
        validation: packed documents in their own order; None if the split has none.
        fingerprint: hash of the indices, the proportions and samples of the token ids.
    """

    training: Windows
    validation: Windows | None
    fingerprint: str


def load_indexed_windows(flags: DataFlags, *, seed: int, vocab_size: int) -> IndexedWindows:
    """Open the datasets of `flags` and return the windows of each side.

    Args:
        flags: `data_path` with `split`, or `train_data_path` and `valid_data_path`; sequence length.
        seed: seed of the order of the training windows.
        vocab_size: reading a larger id raises.

    Raises:
        DataError: a flag cannot be parsed, a file is damaged, or a side has no window.
    """
    shares = parse_split(flags.split) if flags.data_path else None
    blends = _blends(flags, shares)
    digest = hashlib.sha256(repr((shares, [[weight for _, weight in blend] for blend in blends])).encode())
    datasets: dict[Path, IndexedDataset] = {}
    for prefix, _ in [*blends[0], *blends[1]]:
        if prefix not in datasets:
            datasets[prefix] = IndexedDataset(prefix)
            for block in content_samples(datasets[prefix]):
                digest.update(block)
    sides: list[Windows | None] = []
    for side, blend in enumerate(blends):
        sources = []
        for prefix, _ in blend:
            dataset = datasets[prefix]
            source = PackedDocuments(
                dataset,
                _sequences(len(dataset), shares, side),
                seq_length=flags.seq_length,
                seed=None if side else seed,
                vocab_size=vocab_size,
            )
            _check_has_windows(source, prefix, flags, side)
            sources.append(source)
        sides.append(_mix(sources, [weight for _, weight in blend]) if blend else None)
    training, validation = sides
    if training is None:
        raise DataError(f"--split {flags.split}: leaves no document to train on, expected a first number above 0.")
    return IndexedWindows(training, validation, digest.hexdigest()[:16])


def parse_blend(words: Sequence[str], flag: str) -> list[tuple[Path, float | None]]:
    """Parse prefixes, or alternating weights and prefixes.

    Args:
        words: the words on the command line.
        flag: their flag, for errors.

    Returns:
        Prefixes and their weights; without weights, None for each, which means in proportion to its windows.

    Raises:
        DataError: only some prefixes have weights, or a weight is not above 0.

    Example:
        >>> parse_blend(["0.3", "a", "0.7", "b"], "--data-path")
        [(PosixPath('a'), 0.3), (PosixPath('b'), 0.7)]
        >>> parse_blend(["a", "b"], "--data-path")
        [(PosixPath('a'), None), (PosixPath('b'), None)]
    """
    numbers = [_number(word) for word in words]
    if all(number is None for number in numbers):
        return [(Path(word), None) for word in words]
    weights, prefixes = numbers[::2], words[1::2]
    is_pairs = len(weights) == len(prefixes) and all(number is None for number in numbers[1::2])
    if not is_pairs or any(weight is None or weight <= 0 for weight in weights):
        raise DataError(
            f"{flag}: got {' '.join(words)}, expected prefixes, or a weight above 0 before each prefix, as in 0.3 a 0.7 b."
        )
    return [(Path(prefix), weight) for prefix, weight in zip(prefixes, weights, strict=True)]


def parse_split(text: str) -> tuple[float, float, float]:
    """Parse "969,30,1" into fractions for training, validation and test.

    Raises:
        DataError: not one to three numbers of at least 0, or all of them 0.

    Example:
        >>> parse_split("90,10")
        (0.9, 0.1, 0.0)
    """
    numbers = [_number(part) for part in text.split(",")]
    if len(numbers) > len(_SIDES) or any(number is None or number < 0 for number in numbers) or not any(numbers):
        raise DataError(
            f"--split {text}: expected one to three numbers of at least 0, for training, validation and test, such as 969,30,1."
        )
    given = [number or 0.0 for number in [*numbers, 0.0, 0.0][: len(_SIDES)]]
    training, validation, test = (number / sum(given) for number in given)
    return training, validation, test


def _blends(
    flags: DataFlags, shares: tuple[float, float, float] | None
) -> tuple[list[tuple[Path, float | None]], list[tuple[Path, float | None]]]:
    """Return the sources of training and validation; an empty list for a side that is off."""
    if shares is None:
        return parse_blend(flags.train_data_path, "--train-data-path"), parse_blend(
            flags.valid_data_path, "--valid-data-path"
        )
    blend = parse_blend(flags.data_path, "--data-path")
    return (blend if shares[0] else []), (blend if shares[1] else [])


def _sequences(count: int, shares: tuple[float, float, float] | None, side: int) -> tuple[int, int]:
    """Return the sequences of a side, from and to (exclusive); the shares follow one another in the file."""
    if shares is None:
        return 0, count
    return round(sum(shares[:side]) * count), round(sum(shares[: side + 1]) * count)


def _check_has_windows(source: PackedDocuments, prefix: Path, flags: DataFlags, side: int) -> None:
    if source.num_windows:
        return
    name = _SIDES[side]
    advice = f"give more data with --{('train', 'valid')[side]}-data-path"
    if flags.data_path:
        advice = f"give {name} more documents with --split (a second number of 0 turns validation off)"
    raise DataError(
        f"indexed dataset {prefix}: {name} has {source.num_tokens} tokens, expected at least {flags.seq_length + 1} (one "
        f"sequence of --seq-length {flags.seq_length} and the token after it). Lower --seq-length, or {advice}."
    )


def _mix(sources: Sequence[PackedDocuments], weights: Sequence[float | None]) -> Windows:
    if len(sources) == 1:
        return sources[0]
    return BlendedWindows(
        sources,
        [source.num_windows if weight is None else weight for source, weight in zip(sources, weights, strict=True)],
    )


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
