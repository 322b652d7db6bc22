"""The memory of the host."""

from pathlib import Path

import pytest

from recollect.measuring.host_memory import limits_bytes


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ("0::/", [4000]),
        ("0::/slurm/job_1/step_0", [1000, 2000, 4000]),
        ("0::/gone/step_0", [4000]),  # A container sees its own group as the outermost one.
        ("2:cpu,cpuacct:/slurm\n4:memory:/slurm", [3000, 5000]),
        ("2:cpu,cpuacct:/slurm", []),
        ("", []),
    ],
)
def test_a_job_may_use_what_all_groups_around_it_may(own: str, expected: list[int], tmp_path: Path) -> None:
    job = tmp_path / "slurm" / "job_1" / "step_0"
    job.mkdir(parents=True)
    (tmp_path / "memory" / "slurm").mkdir(parents=True)
    for folder, text in ((job, "1000"), (job.parent, "2000"), (tmp_path / "slurm", "max"), (tmp_path, "4000")):
        (folder / "memory.max").write_text(f"{text}\n")
    for folder, text in ((tmp_path / "memory" / "slurm", "3000"), (tmp_path / "memory", "5000")):
        (folder / "memory.limit_in_bytes").write_text(f"{text}\n")
    assert list(limits_bytes(own, tmp_path)) == expected
