"""A few of the families, each day others: no cell is worse than it was recorded."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from sweeps import today
from tools.families import page, ranks, record
from tools.families.axes import AXES, SINGLE
from tools.families.names import names
from tools.families.reference import refer
from tools.families.run import cells, run
from tools.families.verdicts import DIFFERS, OBSCURE, REFUSED, SAME, Verdict, of_ranks, worse
from tools.pools import Pools

from scaletorch.parallel.tensor_parallel.plans import resolve

ROOT = Path(__file__).resolve().parents[1]
SHARES = 96  # of the families, a share a day; `hatch run families` tries all
# Mixtures of experts that transformers 5.0 has, whose plans it writes in other words than today.
# Its HunYuan and Phi-MoE take other weights than those of the experts chosen, and are refused.
MIXTURES = (
    "deepseek_v3", "dots1", "ernie4_5_moe", "glm4_moe", "gpt_oss", "minimax", "mixtral",
    "qwen2_moe", "qwen3_moe",
)  # fmt: skip


@pytest.mark.timeout(600)
@pytest.mark.parametrize("share", today(range(SHARES), SHARES))
def test_no_family_is_worse_than_recorded(share):
    known = record.read().verdicts
    chosen = [name for name in names()[share::SHARES] if name in known]
    found = [*cells(chosen, SINGLE)]
    assert any(verdict.word == SAME for _, _, verdict in found)
    wrong = [
        f"{name} {axis}: {verdict.word} ({verdict.words}), recorded {known[name][axis].word}"
        for name, axis, verdict in found
        if axis in known[name] and worse(verdict, known[name][axis])
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.timeout(600)
def test_experts_are_found_in_the_oldest_transformers(tmp_path):
    libraries = next(ROOT.glob(".launchers/oldest/lib/python3*/site-packages"), None)
    if libraries is None:
        pytest.skip("not installed: hatch env create oldest")
    chosen, kept = [*today(MIXTURES, 9)], tmp_path / "kept.json"
    path = os.pathsep.join([str(libraries), *filter(None, sys.path), str(ROOT)])
    command = [sys.executable, "-m", "tools.families", *chosen, "--axes", "ep,tp", "--json", kept]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True,
        timeout=580,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(kept.read_text())
    assert found["transformers"] == "5.0.0"
    words = {
        (n, axis): cell["word"]
        for n, own in found["families"].items()
        for axis, cell in own.items()
    }
    assert words == dict.fromkeys(((n, axis) for n in chosen for axis in ("ep", "tp")), SAME)


def test_the_pages_are_what_was_recorded():
    for path, text in page.pages(*record.read()).items():
        assert path.read_text() == text, f"python -m tools.families writes {path.name}"


def test_a_difference_of_one_number_is_seen():
    expected, _ = refer("llama")
    pools = Pools()
    assert run(pools, "llama", AXES["dp"], expected, 60).word == SAME
    name = "model.layers.1.mlp.up_proj.weight"
    expected.gradients[1][name].view(-1)[3] += 1e-8 * expected.gradients[1][name].abs().max()
    found = run(pools, "llama", AXES["dp"], expected, 60)
    pools.close()
    assert (found.word, found.words) == (DIFFERS, name)


def test_a_plan_is_suggested_where_float64_needs_exact_computing():
    """XGLM fills a float32 tensor with the least number of float64, which overflows."""
    pools, (expected, _) = Pools(), refer("xglm")
    found = [run(pools, "xglm", AXES[axis], expected, 60).word for axis in ("tp", "sp")]
    pools.close()
    assert found == [SAME, SAME]


def test_what_ranks_say_together():
    trained, heard = ("trained", 1e-15, "loss"), ("heard", 0.0, "another rank refused")
    refused = ("refused", 0.0, "rank 1 (dp0 pp0 cp0 tp1): no. b")
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


def without_plan(name, axis, expected):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resolve, "find_own_plan", lambda *_: None)
        return ranks.run_cell(name, axis, expected)


# Attention cut by heads and stated in other ways: apart, packed, by head, in a module of its own.
ALWAYS = ("llama", "gpt2", "gpt_neox", "bert")


@pytest.mark.timeout(300)
def test_families_train_without_their_plans():
    known = record.read().verdicts
    sound = [name for name in known if known[name]["dp"].word == SAME]  # and run here at all
    always = today(ALWAYS, 2)
    pools, words = Pools(), {}
    for name in dict.fromkeys([*always, *today(sound, 128)]):
        expected, _ = refer(name)
        for axis in ("tp", "sp"):
            said = pools.run(2, without_plan, name, AXES[axis], expected, timeout=60)
            words[name, axis] = of_ranks(said)
    pools.close()
    assert {words[name, axis].word for name in always for axis in ("tp", "sp")} == {SAME}
    assert {verdict.word for verdict in words.values()} <= {SAME, REFUSED}, words
