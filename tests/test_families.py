"""An eighth of the families, each day another one: no cell is worse than it was recorded."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
sys.path += [
    str(Path(__file__).resolve().parents[1]),
    str(Path(__file__).resolve().parents[1] / "packages/scaletorch/tests"),
]

from sweeps import today
from tools.families import page, record
from tools.families.axes import AXES, SINGLE
from tools.families.names import names
from tools.families.reference import refer
from tools.families.run import cells, run
from tools.families.verdicts import DIFFERS, OBSCURE, REFUSED, SAME, Verdict, of_ranks, worse
from tools.pools import Pools


@pytest.mark.timeout(600)
@pytest.mark.parametrize("eighth", today(range(8), 8))
def test_no_family_is_worse_than_recorded(eighth):
    known = record.read().verdicts
    chosen = [name for name in names()[eighth::8] if name in known]
    found = [*cells(chosen, SINGLE)]
    assert any(verdict.word == SAME for _, _, verdict in found)
    wrong = [
        f"{name} {axis}: {verdict.word} ({verdict.words}), recorded {known[name][axis].word}"
        for name, axis, verdict in found
        if axis in known[name] and worse(verdict, known[name][axis])
    ]
    assert not wrong, "\n".join(wrong)


def test_the_pages_are_what_was_recorded():
    for path, text in page.pages(*record.read()).items():
        assert path.read_text() == text, f"python -m tools.families writes {path.name}"


def test_a_difference_of_one_number_is_seen():
    expected = refer("llama")
    pools = Pools()
    assert run(pools, "llama", AXES["dp"], expected, 60).word == SAME
    name = "model.layers.1.mlp.up_proj.weight"
    expected.gradients[1][name].view(-1)[3] += 1e-8 * expected.gradients[1][name].abs().max()
    found = run(pools, "llama", AXES["dp"], expected, 60)
    pools.close()
    assert (found.word, found.words) == (DIFFERS, name)


def test_what_ranks_say_together():
    trained, refused = (
        ("trained", 1e-15, "loss"),
        ("refused", 0.0, "rank 1 (dp0 pp0 cp0 tp1): no. b"),
    )
    heard = ("heard", 0.0, "another rank refused")
    assert of_ranks([trained, ("trained", 3e-9, "w")]) == Verdict(DIFFERS, 3e-9, "w")
    assert of_ranks([heard, refused]) == Verdict(REFUSED, words="no")
    assert of_ranks([trained, refused]).word == OBSCURE
    assert of_ranks([trained, ("trained", float("inf"), "w")]).word == DIFFERS


def test_what_is_worse():
    same, refused, obscure = Verdict(SAME, 1e-15), Verdict(REFUSED), Verdict(OBSCURE)
    assert worse(refused, same)
    assert worse(obscure, refused)
    assert not worse(same, refused)
    assert not worse(obscure, obscure)
