"""`diagnose`: read texts, settings and snapshots, and name the problems."""

import bz2
import dataclasses
import gzip
import json
import lzma
import re
import shutil
import sys
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import yaml

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from recollect.doctor import library_settings, megatron_settings, out_of_memory
from recollect.doctor.rule import CERTAINTIES, ONE_SPEAKS, TOGETHER, Finding
from recollect.doctor.scan import TextScan
from recollect.doctor.settings import KNOWN, Settings, settings_in_data
from recollect.doctor.snapshot import Snapshot, is_snapshot, read_pickle, snapshot_findings, snapshot_of
from recollect.errors import DiagnosisError
from recollect.fields import parse_yaml

_LONGEST_LINE = 64 * 1024  # the rest of the line is read as the next one
_LARGEST_CONFIGURATION = 4 * 2**20
_START_BYTES = 8192
_MOST_EVIDENCE = 4
_LOOKS_LIKE_YAML = re.compile(r"^[\w.-]+:(?: |$)", re.MULTILINE)
_LOOKS_LIKE_TOML = re.compile(r"^\[[\w.-]+\]\s*(?:#.*)?$", re.MULTILINE)
# By the first bytes of compressed files.
_UNPACK: Mapping[bytes, Any] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\x00": lzma.open}


def diagnose(*sources: str | Path) -> list[Finding]:
    """Name the problems of a training run from the files that it left behind.

    Args:
        *sources: each a path, or a text with a space or a line break in it: a log with its traceback, a configuration
            (YAML, JSON, TOML, a command line or script with flags), or a snapshot of `torch.cuda.memory._dump_snapshot` (pickle
            or JSON). Several of one run are judged together. Logs are read line by line, so they may have any size, and
            may be compressed by gzip, bzip2 or xz.

    Returns:
        The findings: first those that end a run, the most certain first; empty if there are none.

    Raises:
        DiagnosisError: a file that is missing, binary or malformed, or a pickle with more than plain data.

    Example:
        >>> import recollect
        >>> (finding,) = recollect.diagnose(
        ...     "AssertionError: full recompute is only supported with full iteration CUDA graph."
        ... )
        >>> finding.problem
        'Recompute of whole layers clashes with CUDA graphs of single layers.'
        >>> [f.rule for f in recollect.diagnose("--recompute-granularity selective --recompute-method uniform")][0]
        'megatron-selective-has-no-method'
    """
    case = Case()
    for source in sources:
        if isinstance(source, str) and _is_text(source):
            case.add_text(source, "text")
        else:
            case.add_file(Path(source))
    return case.findings()


def _is_text(source: str) -> bool:
    try:
        return bool(re.search(r"\s", source)) and ("\n" in source or not Path(source).exists())
    except OSError:  # too long for a name
        return True


@dataclass
class Case:
    """The facts known about one run."""

    texts: list[TextScan] = field(default_factory=list)
    """Logs, tracebacks and scripts."""
    scopes: list[Settings] = field(default_factory=list)
    snapshots: list[Snapshot] = field(default_factory=list)
    read: list[str] = field(default_factory=list)
    """How each source was interpreted, in words."""

    def add_file(self, path: Path, name: str = "") -> None:
        name = name or str(path)
        try:
            if path.is_fifo():
                with path.open("rb") as pipe:
                    return self.add_stream(pipe, name)
            with path.open("rb") as file:
                start = file.read(_START_BYTES)
            size = path.stat().st_size
            # As PowerShell writes it; the other one also leaves out the mark of a UTF-8 file.
            encoding = "utf-16" if start.startswith((b"\xff\xfe", b"\xfe\xff")) else "utf-8-sig"
            if start[:1] == b"\x80":
                self._add_snapshot(read_pickle(path), name)
            elif unpack := next((unpack for begin, unpack in _UNPACK.items() if start.startswith(begin)), None):
                self._add_compressed(path, name, unpack)
            elif b"\x00" in start and encoding != "utf-16":
                raise DiagnosisError(
                    f"{name}: got a binary file, expected text, a configuration, or a snapshot of CUDA memory (a pickle). "
                    "Unpack it first if it is compressed with anything but gzip, bzip2 or xz."
                )
            elif path.suffix == ".json" or size <= _LARGEST_CONFIGURATION:
                self.add_text(path.read_text(encoding=encoding, errors="replace"), name, suffix=path.suffix)
            else:
                with path.open(encoding=encoding, errors="replace") as lines:
                    self._add_lines(iter(lambda: lines.readline(_LONGEST_LINE), ""), name)
        except OSError as problem:
            raise DiagnosisError(f"{name}: cannot be read ({problem.strerror}), expected a file.") from None

    def add_stream(self, stream: BinaryIO, name: str) -> None:
        """Read a pipe, which can be read once, through a file: a long log is then not held in memory."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "input"
            with path.open("wb") as file:
                shutil.copyfileobj(stream, file)
            self.add_file(path, name)

    def add_text(self, text: str, name: str, *, suffix: str = "") -> None:
        """Read a text, or the YAML, TOML or JSON that it turns out to be."""
        data = _configuration(text, name, suffix)
        if data is None:
            self._add_lines(text.splitlines(), name)
        elif is_snapshot(data):
            self._add_snapshot(data, name)
        else:
            self.scopes += settings_in_data(data, name)
            self.read.append(f"{name}: a configuration")

    def _add_lines(self, lines: Iterable[str], name: str) -> None:
        scan = TextScan(lines, name)
        self.texts.append(scan)
        self.read.append(f"{name}: a text of {scan.num_lines} line{'' if scan.num_lines == 1 else 's'}")

    def _add_compressed(self, path: Path, name: str, unpack: Any) -> None:
        """Read a compressed log line by line: unpacked it may have any size."""
        try:
            with unpack(path) as file:
                start = file.read(_START_BYTES)
            if start[:1] == b"\x80" or b"\x00" in start:
                raise DiagnosisError(f"{name}: got a compressed binary file, expected a log. Unpack it first.")
            with unpack(path, "rt", encoding="utf-8", errors="replace") as lines:
                self._add_lines(iter(lambda: lines.readline(_LONGEST_LINE), ""), name)
        except (EOFError, OSError, zlib.error, lzma.LZMAError) as problem:
            raise DiagnosisError(
                f"{name}: cannot be unpacked ({problem}), expected a whole file of gzip, bzip2 or xz. Copy it again."
            ) from None

    def _add_snapshot(self, data: Any, name: str) -> None:
        if not is_snapshot(data):
            raise DiagnosisError(
                f"{name}: got a pickle of a {type(data).__name__} without segments, expected a snapshot written by "
                "torch.cuda.memory._dump_snapshot(path)."
            )
        self.snapshots += snapshot_of(data, name)
        self.read.append(f"{name}: a snapshot of device memory")

    def findings(self) -> list[Finding]:
        """Return the findings, one per mistake: first those that end a run, the most certain first."""
        merged: dict[tuple[str, str], Finding] = {}
        for found in self._all():
            # Findings of several ranks or scopes differ in numbers; of several devices' snapshots each one counts.
            key = (found.rule, found.problem if found.rule.startswith("snapshot-") else "")
            merged[key] = _together(merged[key], found) if key in merged else found
        findings = list(merged.values())
        for names in TOGETHER:
            findings = _joined(findings, names, adds_advice=True)
        for names in ONE_SPEAKS:
            findings = _joined(findings, names)
        return sorted(findings, key=lambda its: (not its.fatal, CERTAINTIES.index(its.certainty)))

    def _all(self) -> Iterator[Finding]:
        scopes = [*self.scopes, *(scope for text in self.texts for scope in text.settings())]
        # Of all files as one scope; the first file with a name wins.
        values = {name: value for scope in reversed(scopes) for name, value in scope.values.items()}
        together = Settings(", ".join(dict.fromkeys(scope.place.partition(": ")[0] for scope in scopes)), values)
        length = together.get("seq_length", "max_length", "max_seq_length", "cutoff_len", "sequence_len")
        is_checkpointing = library_settings.is_checkpointing(together)
        expandable = next((text.numbers.expandable for text in self.texts if text.numbers.expandable), "")
        for text in self.texts:
            yield from text.findings()
            for passage in text.out_of_memory:
                yield from out_of_memory.findings(
                    passage, length=length or 4096, is_checkpointing=is_checkpointing, expandable=expandable
                )
        ran_out = next((text.out_of_memory[0].quoted() for text in self.texts if text.out_of_memory), "")
        nan = next((text.numbers.nan for text in self.texts if text.numbers.nan), "")
        for scope in scopes:
            if megatron_settings.is_megatron(scope):
                yield from megatron_settings.findings(scope, out_of_memory=ran_out, nan=nan)
        yield from library_settings.findings(together)
        for snapshot in self.snapshots:
            yield from snapshot_findings(snapshot)


def _configuration(text: str, name: str, suffix: str) -> Mapping[Any, Any] | None:
    """Return the mapping in a text of YAML, TOML or JSON; None if it is a log or a script."""
    if suffix == ".toml" or _LOOKS_LIKE_TOML.search(text):
        try:
            return tomllib.loads(text)
        except tomllib.TOMLDecodeError as problem:
            if suffix == ".toml":
                raise DiagnosisError(
                    f"{name}: got malformed TOML ({problem}), expected sections of settings."
                ) from None
    is_yaml = suffix in (".yaml", ".yml")
    is_json = suffix == ".json" or text.lstrip().startswith("{")
    if not is_yaml and not is_json and not _LOOKS_LIKE_YAML.search(text):
        return None
    try:
        data = json.loads(text) if is_json and not is_yaml else parse_yaml(text)
    except (yaml.YAMLError, ValueError, RecursionError) as problem:
        if is_yaml:
            where = str(problem).splitlines()[0]
            raise DiagnosisError(f"{name}: got malformed YAML ({where}), expected a mapping of settings.") from None
        if suffix == ".json":
            raise DiagnosisError(
                f"{name}: got malformed JSON ({problem}), expected a configuration or a snapshot."
            ) from None
        return None
    is_named = is_yaml or suffix == ".json"
    if isinstance(data, Mapping) and (is_named or is_snapshot(data) or _has_settings(data)):
        return data
    if is_yaml:
        raise DiagnosisError(f"{name}: got a YAML {type(data).__name__}, expected a mapping of settings.")
    return None


def _has_settings(data: Mapping[Any, Any]) -> bool:
    return any(
        str(name).replace("-", "_") in KNOWN or (isinstance(value, Mapping) and _has_settings(value))
        for name, value in data.items()
    )


def _together(first: Finding, second: Finding) -> Finding:
    evidence = tuple(dict.fromkeys((*first.evidence, *second.evidence)))[:_MOST_EVIDENCE]
    best = min(first, second, key=lambda found: CERTAINTIES.index(found.certainty))
    return dataclasses.replace(best, evidence=evidence, fatal=first.fatal or second.fatal)


def _joined(findings: list[Finding], names: Sequence[str], *, adds_advice: bool = False) -> list[Finding]:
    """Return the findings with one per mistake: the one that comes first in `names`.

    With `adds_advice` any of them may speak for those after it, otherwise only the first.
    """
    same = sorted((its for its in findings if its.rule in names), key=lambda its: names.index(its.rule))
    if len(same) < 2 or (same[0].rule != names[0] and not adds_advice):
        return findings
    speaker, *others = same
    together = dataclasses.replace(
        speaker,
        evidence=tuple(dict.fromkeys(line for its in same for line in its.evidence))[:_MOST_EVIDENCE],
        fix=tuple(advice for its in same for advice in its.fix) if adds_advice else speaker.fix,
        fatal=any(its.fatal for its in same),
    )
    return [together if its is speaker else its for its in findings if its not in others]
