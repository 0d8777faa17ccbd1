"""Models that are no decoders of tokens train as in one process on every layout, or are refused."""

import functools
import re
import traceback

import pytest
import torch
from other_models import CELLS, LAYOUTS, MODELS, RIGHT, outcome
from sweeps import today

from scaletorch.compose import (
    full_gradients,
    full_state_dict,
    parallelize,
    shard_global_batch,
    train_step,
)
from scaletorch.dist import RankPool
from scaletorch.dist.errors import ScaletorchError
from scaletorch.dist.testing import preload
from scaletorch.parallel.data_parallel import shard_optimizer
from scaletorch.parallel.pg_manager import (
    destroy_process_group_manager,
    setup_process_group_manager,
)

pytest.importorskip("transformers")
pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore::RuntimeWarning")]
preload(*(f"transformers.models.{n}.modeling_{n}" for n in ("vit", "clip", "whisper", "t5")))

STEPS, DAYS = 3, 8
WRONG = 1e-11


def train(name, layout):
    """Losses of three steps, the first gradients and the last weights, all of them whole."""
    make, batch, loss_fn, micro_batches = MODELS[name]
    sizes = {axis: size for axis, size in layout.items() if axis.endswith("_size")}
    manager = setup_process_group_manager(**sizes)
    torch.manual_seed(0)
    model = make().double()
    told = {"sequence_parallel": True} if layout.get("sequence_parallel") else {}
    model = parallelize(model, manager, **told)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zero = layout.get("zero")
    if zero:
        shard_optimizer(optimizer, model, stage=zero)
    found = {}
    for step in range(STEPS):
        cut = shard_global_batch(batch(step), micro_batches, model=model)
        loss = train_step(model, cut, loss_fn=loss_fn)
        found[f"loss {step}"] = loss.double()
        if not step:
            found |= {f"gradient of {n}": g.clone() for n, g in full_gradients(model).items()}
        optimizer.step()
        optimizer.zero_grad()
    return found | full_state_dict(model)


@functools.cache
def one_process(name):
    """The same, without this library."""
    make, batch, loss_fn, *_ = MODELS[name]
    torch.manual_seed(0)
    model = make().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = {}
    for step in range(STEPS):
        entries = batch(step)
        given = {n: x for n, x in entries.items() if n != "labels" and not n.startswith("loss_")}
        total, count = loss_fn(model(**given), entries)
        found[f"loss {step}"] = loss = total / count
        loss.backward()
        if not step:
            found |= {
                f"gradient of {n}": p.grad.clone()
                for n, p in model.named_parameters(remove_duplicate=False)
                if p.grad is not None
            }
        optimizer.step()
        optimizer.zero_grad()
    return {n: x.detach() for n, x in found.items()} | model.state_dict()


def error_of(name, layout):
    """The largest relative error of a cell and where it is, or how it was refused."""
    try:
        found = train(name, LAYOUTS[layout])
    except ScaletorchError as error:
        return "refused", f"{type(error).__name__}: {error}"
    except Exception as error:
        return "obscure", "".join(traceback.format_exception(error))
    finally:
        destroy_process_group_manager()
    expected = one_process(name)
    if found.keys() != expected.keys():
        return "wrong", f"other names: {sorted(found.keys() ^ expected.keys())[:5]}"
    # Of gradients that are zero, such as those of keys' biases, only rounding is left.
    errors = {n: float((found[n] - x).norm() / max(x.norm(), 1e-3)) for n, x in expected.items()}
    where = max(errors, key=errors.get)
    return ("right" if errors[where] < WRONG else "wrong"), f"{errors[where]:.0e} {where}"


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
    for rank, (kind, text) in enumerate(pools().run(error_of, name, layout)):
        assert kind == ("right" if words == RIGHT else "refused"), f"rank {rank}: {kind}, {text}"
        if words != RIGHT:
            assert re.search(words, text, re.DOTALL), f"rank {rank}: {text}"
