"""The faults of `scripts/mutate` can be put into this tree, and what runs the tests of a copy tells right from wrong."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from mutations.catalogue import MUTATIONS  # noqa: E402
from mutations.mutation import Mutation, place, problems, write  # noqa: E402
from mutations.run import noticed_by  # noqa: E402


def tree(tmp_path: Path) -> Path:
    package = tmp_path / "src" / "recollect" / "engine"
    package.mkdir(parents=True)
    (package / "tape.py").write_text("def f():\n    return 1\n", encoding="utf-8")
    (package / "values.py").write_text(
        "def g():\n    return 2  # twice\n\n\ndef h():  # twice\n    pass\n", encoding="utf-8"
    )
    return tmp_path


def test_every_fault_has_its_place() -> None:
    assert problems(MUTATIONS, ROOT) == [], "mend what moved: scripts/mutate --check"


def test_every_fault_has_a_quick_test_that_notices_it() -> None:
    named = noticed_by(ROOT)
    assert named.keys() == {mutation.name for mutation in MUTATIONS}
    for fault, test in named.items():
        path, _, function = test.partition("[")[0].partition("::")
        found = re.search(rf"((?:^@.*\n|^[ )].*\n)*)^def {function}\(", (ROOT / path).read_text(encoding="utf-8"), re.M)
        assert found, f"{fault}: there is no {test}"
        assert "mark.long\n" not in found[1], f"{fault}: {test} is a long one"


def test_faults_of_every_package() -> None:
    packages = {path.name for path in (ROOT / "src" / "recollect").iterdir() if (path / "__init__.py").exists()}
    assert packages <= {mutation.area for mutation in MUTATIONS}


def test_a_fault_is_in_one_file_of_its_package(tmp_path: Path) -> None:
    root = tree(tmp_path)
    (path,) = changed = place(Mutation("one", "", "engine", (("return 1", "return 3"),)), root)
    assert path.name == "tape.py"
    write(changed)
    assert path.read_text(encoding="utf-8") == "def f():\n    return 3\n"


def test_all_faults_without_a_place_are_told_at_once(tmp_path: Path) -> None:
    faults = (
        Mutation("good", "", "engine", (("return 1", "return 3"),)),
        Mutation("gone", "", "engine", (("return 4", "return 3"),)),
        Mutation("unclear", "", "engine", (("twice", "once"),)),
        Mutation("unclear", "", "planning", (("twice", "once"),)),
        Mutation("broken", "", "engine/tape.py", (("return 1", "return ("),)),
    )
    told = problems(faults, tree(tmp_path))
    assert told[:4] == [
        "unclear: the name is used 2 times",
        "gone: expected once in src/recollect/engine, found nowhere: 'return 4'",
        "unclear: expected once in src/recollect/engine, found 2 in values.py: 'twice'",
        "unclear: there is no src/recollect/planning",
    ]
    assert told[4].startswith("broken: its code does not compile") and len(told) == 5
