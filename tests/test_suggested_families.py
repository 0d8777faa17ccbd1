"""Families of transformers train as one process does with their plans hidden."""

import pytest

pytest.importorskip("transformers")

from sweeps import today
from tools.families import ranks, record
from tools.families.axes import AXES
from tools.families.reference import refer
from tools.families.verdicts import REFUSED, SAME, of_ranks
from tools.pools import Pools

from scaletorch.parallel.tensor_parallel.plans import resolve

FOUND = ("find_own_plan", "find_torch_layers")
# Attention cut by heads and stated in other ways: apart, packed, by head, in a module of its own.
ALWAYS = ("llama", "gpt2", "gpt_neox", "bert")


def hidden(name, axis, expected):
    with pytest.MonkeyPatch.context() as patch:
        for each in FOUND:
            patch.setattr(resolve, each, lambda *_: None)
        return ranks.run_cell(name, axis, expected)


@pytest.mark.timeout(300)
def test_families_train_without_their_plans():
    known = record.read().verdicts
    sound = [name for name in known if known[name]["dp"].word == SAME]  # and run here at all
    always = today(ALWAYS, 2)
    names = dict.fromkeys([*always, *today(sound, 128)])
    pools, words = Pools(), {}
    for name in names:
        expected = refer(name)
        for axis in ("tp", "sp"):
            said = pools.run(2, hidden, name, AXES[axis], expected, timeout=60)
            words[name, axis] = of_ranks(said)
    pools.close()
    assert {words[name, axis].word for name in always for axis in ("tp", "sp")} == {SAME}
    assert {verdict.word for verdict in words.values()} <= {SAME, REFUSED}, words
