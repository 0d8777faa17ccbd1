"""The document of faults lists those that there are; sources and models have where each is put."""

import ast
import sys
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "tools"))

from mutants import MUTANTS, matches
from mutants.hunt import MODELS
from mutants.locating import DIRECTIONS, ELSEWHERE
from mutation.planted import Plant, is_of, plants, short, to_markdown

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = (ROOT / "docs" / "mutants.md").read_text()


def rows_behind(heading):
    """Return the rows of the first table behind a heading, each split into its cells."""
    lines = DOCUMENT.partition(f"# {heading}\n")[2].splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("| "))
    end = next(n for n, line in enumerate(lines[first:], first) if not line.startswith("|"))
    return [line.strip("| ").split(" | ") for line in lines[first + 2 : end]]


def test_every_mutant_is_in_the_table_and_none_survives():
    rows = rows_behind("Faults that the proof must find")
    cells = {name: [fault, case] for name, fault, case, *_ in rows}
    assert cells == {name: [each.fault, str(each.case)] for name, each in MUTANTS.items()}
    assert not any("survives" in row[3] for row in rows)


def test_nearly_every_mutant_is_located():
    rows = rows_behind("Faults that the proof must find")
    right = sum(not row[-1].endswith(ELSEWHERE) and row[-1] != "nowhere" for row in rows)
    assert right >= 0.95 * len(MUTANTS)


def test_every_planted_fault_is_in_the_table():
    rows = rows_behind("Faults that tests must find")
    assert [f"| {' | '.join(row)} |" for row in rows] == to_markdown(plants()).splitlines()[2:]


def test_every_planted_fault_is_one_change_of_a_source_and_has_its_test():
    found = plants()
    assert len({each.name for each in found}) == len(found) >= 50
    for each in found:
        source = (ROOT / each.file).read_bytes()
        changed = each.mutant(ROOT).apply(source)
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(source)), each.name
        file, _, function = each.test.partition("::")
        assert f"def {function.partition('[')[0]}(" in (ROOT / file).read_text(), each.name


def test_a_text_that_is_gone_or_there_twice_is_an_error(tmp_path):
    plant = Plant("name", "A fault.", "toy.py", "a = 1", "a = 2", "tests/test_toy.py::test_toy")
    for source, times in (("b = 1\n", 0), ("a = 1\na = 1\n", 2)):
        (tmp_path / "toy.py").write_text(source)
        with pytest.raises(ValueError, match=f"name: toy.py has its text {times} times"):
            plant.mutant(tmp_path)
    (tmp_path / "toy.py").write_text("b = 1\na = 1\n")
    mutant = plant.mutant(tmp_path)
    assert mutant.place.line == 2
    assert mutant.apply((tmp_path / "toy.py").read_bytes()) == b"b = 1\na = 2\n"
    assert is_of("tests/test_toy.py::test_toy[1]", plant.test)
    assert not is_of("tests/test_toy.py::test_toy_too", plant.test)
    assert short(plant.test) == "test_toy.py::test_toy"


NORMS = "backward: *.q_norm | *.k_norm ; synchronisation: *_norm.weight"
MODULE, WEIGHT = "layers.0.self_attn.q_norm", "layers.0.self_attn.q_norm.weight"


@pytest.mark.parametrize(
    ("born", "direction", "modules", "parameters", "led"),
    [
        (NORMS, "backward", [MODULE], [], True),
        (NORMS, "backward", [], [WEIGHT], True),
        (NORMS, "synchronisation", [], [WEIGHT], True),
        (NORMS, "forward", [MODULE], [], False),
        (NORMS, "backward", [MODULE, "layers.0.mlp"], [], False),
        (NORMS, "synchronisation", [], [WEIGHT, "spare.bias"], False),
        (NORMS, "backward", [], [], False),
        ("backward: layers.?", "backward", ["layers.3"], [], True),
        ("backward: layers.?", "backward", ["layers.3.mlp"], [], False),
        ("synchronisation: gradients", "synchronisation", [], ["embed_tokens.weight"], True),
        ("update: norm", "update", ["norm"], [], True),
        ("update: norm", "update", ["weights"], [], False),
        ("forward: model", "forward", [""], [], True),
    ],
)
def test_a_report_leads_to_where_a_fault_is_born_or_not(born, direction, modules, parameters, led):
    assert matches(born, direction, modules, parameters) is led


WORDS = {"model", "loss", "gradients", "norm", "clip", "weights", "labels", "position_ids"}


def test_every_fault_is_born_where_its_model_has_something():
    names = {}
    for kind, (model_fn, _, _) in MODELS.items():
        model = model_fn()
        names[kind] = WORDS | {name for name, _ in model.named_modules()}
        names[kind].update(name for name, _ in model.named_parameters(remove_duplicate=False))
    for mutant in MUTANTS.values():
        for place in mutant.born.split(" ; ") if mutant.born else ():
            direction, patterns = place.split(": ")
            assert direction in DIRECTIONS, mutant.name
            for pattern in patterns.split(" | "):
                found = (fnmatchcase(name, pattern) for name in names[mutant.model])
                assert any(found), (mutant.name, pattern)
