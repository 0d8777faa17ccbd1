"""How long files and functions may be, and how docstrings are written, of every package."""

import re

import pytest
from tools.house.measure import too_long
from tools.house.words import offences
from tools.packages import PACKAGES, ROOT, folder


@pytest.mark.parametrize("package", PACKAGES)
def test_no_file_and_no_function_is_too_long(package):
    source = folder(package) / "src"
    wrong = too_long(source, source)
    assert not wrong, "\n".join(f"{each.name}: {each.lines} lines" for each in wrong)


@pytest.mark.parametrize("package", PACKAGES)
def test_docstrings_are_plain(package):
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {reason}"
        for path in sorted((folder(package) / "src").rglob("*.py"))
        for line, reason in offences(path)
    ]
    assert not wrong, "\n".join(wrong)


# What calls a backend's reductions itself: all else asks the table of devices for dtypes.
DIST = "packages/scaletorch-dist/src/scaletorch/dist"
RAW = {
    f"{DIST}/transport/ways.py": "asks",
    f"{DIST}/collectives/reduce.py": "asks",
    f"{DIST}/mpi/group.py": "a backend",
    f"{DIST}/world/info.py": "a float32 of the host, below the collectives",
}
REDUCTION = re.compile(
    r"\b(?:c10d|torch\.distributed)\.(?:all_reduce|reduce|reduce_scatter)\w*\b"
    r"|\b(?:raw_(?:all_)?reduce|reduce_scatter_single)\("
)


def test_every_reduction_asks_what_the_backend_takes():
    found = set()
    for package in PACKAGES:
        for path in (folder(package) / "src").rglob("*.py"):
            code = re.sub(r'"""[^"]*"""', "", path.read_text())
            if REDUCTION.search(code):
                found.add(str(path.relative_to(ROOT)))
    assert found == set(RAW)


def test_the_readme_stays_short():
    assert (ROOT / "README.md").read_text().count("\n") <= 120


def test_docstrings_in_another_dialect_are_found(tmp_path):
    module = tmp_path / "module.py"
    module.write_text(
        '"""Return ``x``, or None where it is alike.\n\nArgs:\n    x: a tensor.\n"""\n'
    )
    found = " ".join(reason for _, reason in offences(module))
    for words in ("or None if", '"if" for a condition', "the same", "backticks", "capital letter"):
        assert words in found
    module.write_text('"""Return whether `x` is the same, or None if there is none."""\n')
    assert not [*offences(module)]


def test_a_long_function_and_a_long_file_are_found(tmp_path):
    (tmp_path / "long.py").write_text("def long():\n" + "    pass\n" * 60 + "\n" * 340)
    assert [(each.place, each.lines) for each in too_long(tmp_path, tmp_path)] == [
        ("long.py", 401),
        ("long.py long", 61),
    ]
