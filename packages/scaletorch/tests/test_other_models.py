"""Models that are no decoders of tokens train as in one process on every layout, or are refused."""

import functools
import re
import traceback

import pytest
import torch
from other_models import CELLS, LAYOUTS, MODELS, RIGHT, outcome
from sweeps import today
from training import in_one_process, on_a_layout, require_alike

from scaletorch.dist import RankPool
from scaletorch.dist.errors import ScaletorchError
from scaletorch.dist.testing import preload

pytest.importorskip("transformers")
pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore::RuntimeWarning")]
preload(*(f"transformers.models.{n}.modeling_{n}" for n in ("vit", "clip", "whisper", "t5")))

STEPS, DAYS = 2, 32


def built(name):
    torch.manual_seed(0)
    return MODELS[name].make().double()


@functools.cache
def one_process(name):
    batches = [MODELS[name].batch(step) for step in range(STEPS)]
    return in_one_process(built(name), batches, loss_fn=MODELS[name].loss)


def outcome_of(name, layout):
    """Return how a cell ends: right, refused in which words, wrong or obscure and where."""
    layout = dict(LAYOUTS[layout])
    sizes = {axis: size for axis, size in layout.items() if axis.endswith("_size")}
    shares = {"sequence_parallel": True} if layout.get("sequence_parallel") else {}
    try:
        found = on_a_layout(
            functools.partial(built, name),
            sizes,
            [MODELS[name].batch(step) for step in range(STEPS)],
            options=shares, micro_batches=MODELS[name].micro_batches, rehearse=True,
            stage=layout.get("zero", 0), loss_fn=MODELS[name].loss,
        )  # fmt: skip
        require_alike(found, one_process(name), least=1e-3)
    except ScaletorchError as error:
        return "refused", f"{type(error).__name__}: {error}"
    except Exception as error:
        return "wrong or obscure", "".join(traceback.format_exception(error))
    return "right", ""


@pytest.fixture(scope="module")
def pools():
    """Four ranks for all cells; others if a cell has ended them."""
    made = []

    def pool():
        if not made or not made[-1].reusable:
            made.append(RankPool(4, timeout=100, seed=0))
        return made[-1]

    yield pool
    for each in made:
        each.close()


@pytest.mark.parametrize(("name", "layout"), today(CELLS, DAYS), ids=str)
def test_other_models_are_right_or_refused_in_words(pools, name, layout):
    words = outcome(name, layout)
    for rank, (kind, text) in enumerate(pools().run(outcome_of, name, layout)):
        assert kind == ("right" if words == RIGHT else "refused"), f"rank {rank}: {kind}, {text}"
        if words != RIGHT:
            assert re.search(words, text, re.DOTALL), f"rank {rank}: {text}"
