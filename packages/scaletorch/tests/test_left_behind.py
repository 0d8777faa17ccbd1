"""A step leaves nothing behind: no object that stays, no garbage that holds tensors, no model.

What a graph holds must not hold the graph: such a circle goes through C++, where no collector
sees it, and stays for ever. Circles that the collector sees keep activations until it comes.
"""

import gc
import sys
import weakref
from collections import Counter
from contextvars import copy_context
from functools import partial
from pathlib import Path

import pytest
import torch
from mutants.patch import patched
from sweeps import today
from training import SIZES, llama, ranks_of, tokens

from scaletorch import bisect, compose
from scaletorch.dist import cleanup_dist, init_dist, launch
from scaletorch.dist.errors import ScaletorchError
from scaletorch.dist.testing import run_ranks
from scaletorch.models import Mixture, MixtureConfig
from scaletorch.parallel.data_parallel import shard_optimizer
from scaletorch.parallel.pg_manager import (
    destroy_process_group_manager,
    setup_process_group_manager,
)
from scaletorch.plan import Cut, describe

TASKS = Path("/proc/self/task")
EARLIER, STEPS = 2, 3  # before anything is counted, as caches fill; and of which none may add
EXPERTS = {"dp_size": 2, "pp_size": 2, "ep_size": 2}


deep_llama = partial(llama, num_layers=4)


def deep_mixture():
    return Mixture(MixtureConfig(**{**SIZES, "num_layers": 4}, num_experts=4))


# A model, the grid, the options of `parallelize`, and the stage of ZeRO.
LAYOUTS = {
    "sequences": (
        llama,
        {"tp_size": 2, "cp_size": 2},
        {"sequence_parallel": True, "loss_parallel": True, "recompute": "selective"},
        0,
    ),
    "heads": (llama, {"cp_size": 2}, {"cp_method": "ulysses", "recompute": "selective"}, 1),
    "split backwards": (
        deep_llama,
        {"pp_size": 2, "dp_size": 2},
        {"schedule": "zb_v", "bucket_size": 500, "data_parallel": {"check_finite": True}},
        2,
    ),
    "pairs": (deep_mixture, EXPERTS, {"schedule": "dualpipe_v", "recompute": True}, 0),
}


class Planned(RuntimeError):
    pass


def failing(output, micro_batch):
    raise Planned


def counting(micro_batch):
    return micro_batch["labels"].numel()


def step(model, optimizer, micro_batches):
    """Train, evaluate, and recover from a step that fails."""
    some = compose.shard_global_batch(tokens(rows=8), micro_batches, model=model)
    compose.train_step(model, some)
    compose.clip_grad_norm_(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    compose.eval_step(model, some)
    try:
        compose.train_step(model, some, loss_fn=failing, count_fn=counting)
    except (Planned, ScaletorchError):  # not by pytest.raises, which would keep it
        model.reset()
    else:
        pytest.fail("it had to fail")


def kinds():
    """Count what is alive by type."""
    return Counter(type(each).__qualname__ for each in gc.get_objects())


def collected():
    """Collect garbage; return what of it is a tensor, or of a graph, and so holds tensors."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    gc.set_debug(0)
    found = Counter(
        type(each).__qualname__
        for each in gc.garbage
        if isinstance(each, torch.Tensor | torch._C._FunctionBase)
    )
    gc.garbage.clear()
    gc.collect()
    return found


def counted(step):
    """Return what steps have made garbage, and what has become more."""
    for _ in range(EARLIER):
        step()
    kinds()
    gc.collect()
    gc.disable()
    try:
        step()
        garbage, before = collected(), kinds()
        for _ in range(STEPS):
            step()
        garbage += collected()
        more = kinds()
        more.subtract(before)
    finally:
        gc.enable()
    return garbage, {name: number for name, number in more.items() if number}


def leave(*layout):
    """Return what steps leave on a layout; each looks at the same sample of parameters."""
    with patched("compose.samples:PERIOD", lambda _: 1):
        return left(*layout)


def made(kind, sizes, options, stage):
    """Return the arguments of `step` on a layout."""
    manager = setup_process_group_manager(**sizes)
    torch.manual_seed(0)
    model = compose.parallelize(kind(), manager, **options, rehearse=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if stage:
        shard_optimizer(optimizer, model, stage=stage)
    return model, optimizer, 4 if manager.pp_size > 1 else 1


def left(*layout):
    """Return that, and whether the model lives when nobody names it."""
    model, optimizer, micro_batches = made(*layout)
    garbage, more = counted(partial(step, model, optimizer, micro_batches))
    living = weakref.ref(model), weakref.ref(optimizer)
    del model, optimizer
    gc.collect()
    alive = [type(each()).__name__ for each in living if each() is not None]
    destroy_process_group_manager()
    return garbage, more, alive


@pytest.mark.parametrize("layout", today([*LAYOUTS], 4))
def test_steps_leave_nothing_behind(layout):
    ranks = ranks_of(LAYOUTS[layout][1])
    # On new ranks: those of other tests may drop what a test's own code has kept.
    for garbage, more, alive in launch(leave, ranks, *LAYOUTS[layout], backend="gloo"):
        assert not garbage
        assert max(more.values(), default=0) < STEPS, more
        assert not alive


def end(*layout):
    """Train under a launcher's variables; return the threads of groups that outlive their end."""
    init_dist(backend="gloo")
    step(*made(*layout))
    cleanup_dist()
    return [name for path in TASKS.glob("*/comm") if "gloo" in (name := path.read_text())]


@pytest.mark.skipif(not TASKS.exists(), reason="reads threads' names in /proc")
def test_no_thread_of_a_group_outlives_a_training():
    """One that does can abort a process which is ending, as it drops a tensor of Python's."""
    assert run_ranks(end, 4, *LAYOUTS["pairs"], init=False) == [[]] * 4


# In ranks, where a collector has few objects to look at.
def recordings(folder):
    model, whole = llama(), tokens(rows=8)

    def recorded():
        with bisect.record(folder, model) as tape:
            logits = model(whole["input_ids"]).flatten(0, 1)
            loss = torch.nn.functional.cross_entropy(logits, whole["labels"].flatten())
            loss.backward()
            tape.put("loss", loss)
        model.zero_grad()

    return counted(recorded)


def test_recordings_leave_nothing_behind(tmp_path):
    ((garbage, more),) = run_ranks(recordings, 1, tmp_path, init=False)
    assert not garbage
    assert max(more.values(), default=0) < STEPS, more


def descriptions():
    described = partial(describe, llama, 8, cuts=[Cut(tp=2)])
    described()
    hook, variables = sys.excepthook, len(copy_context())
    _, more = counted(described)
    assert len(copy_context()) == variables
    assert sys.excepthook is hook
    return more


def test_descriptions_leave_nothing_behind():
    """Nor context variables, which are no objects that a collector counts, nor hooks of errors."""
    (more,) = run_ranks(descriptions, 1, init=False)
    assert max(more.values(), default=0) < STEPS, more
