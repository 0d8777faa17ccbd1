"""Muon and its kin on every layout: whole matrices on one tp rank each, as in one process."""

from __future__ import annotations

import copy
import functools
import importlib
import re
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from sample_optimizers import ClippedAll, Lamb, Shampoo, gap
from small_models import Stack
from sweeps import today
from torch import nn
from torch.nn import functional as F
from training import grid, ranks_of, tokens

from scaletorch.checkpoint import load, save
from scaletorch.compose import (
    clip_grad_norm_,
    full_state_dict,
    parallelize,
    shard_global_batch,
    train_step,
    whole_matrices,
)
from scaletorch.dist import get_rank, get_world_size
from scaletorch.dist.errors import InvalidArgumentError, MismatchError, StateError
from scaletorch.dist.testing import distributed_test, run_ranks
from scaletorch.models import Llama, LlamaConfig
from scaletorch.parallel.data_parallel import shard_optimizer
from scaletorch.parallel.pg_manager import get_process_group_manager
from scaletorch.parallel.tensor_parallel import Fused

GUIDE = Path(__file__).parents[3] / "docs" / "communication.md"
STEPS = 3
BOUND = 1e-11
# Uneven shares of the vocabulary and of the width; one key/value head, which two ranks have.
SIZES = {"vocab_size": 33, "hidden_size": 16, "intermediate_size": 25, "num_heads": 4}


class Gated(nn.Module):
    """A block of one fused weight."""

    def __init__(self):
        super().__init__()
        self.gate_up, self.down = nn.Linear(12, 2 * 11), nn.Linear(11, 12)

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


PLAN = {
    "embed": "vocab", "layers.*.gate_up": Fused("column", 2), "layers.*.down": "row",
    "head": "column_gather",
}  # fmt: skip


def plain(name):
    torch.manual_seed(0)
    if name == "gated":
        return Stack((Gated() for _ in range(2)), 12, 33).double()
    return Llama(LlamaConfig(**SIZES, num_layers=2, num_kv_heads=1)).double()


batch = functools.partial(tokens, rows=8, words=33)


def muon(model):
    """Muon for hidden matrices, AdamW for the rest, as its users do."""
    named = list(model.named_parameters())
    hidden = [p for name, p in named if p.ndim == 2 and "layers." in name]
    rest = [p for name, p in named if p.ndim != 2 or "layers." not in name]
    return [torch.optim.Muon(hidden, lr=0.02), torch.optim.AdamW(rest, lr=0.01, eps=1e-3)]


def muon_alone(model):
    """Embeddings and the head too."""
    return [torch.optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=0.02)]


def adafactor(model):
    return [torch.optim.Adafactor(model.parameters(), lr=0.02)]


def lamb(model):
    return [Lamb(model.parameters())]


def shampoo(model):
    return [Shampoo(model.parameters())]


def step_in_one_process(model, optimizers, step, clips=False):
    whole = batch(step)
    logits = model(whole["input_ids"])
    F.cross_entropy(logits.flatten(0, 1), whole["labels"].flatten()).backward()
    if clips:
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


@functools.cache
def reference(name, make, clips=False):
    """Return one process's weights after each step."""
    model, weights = plain(name), []
    optimizers = make(model)
    for step in range(STEPS):
        step_in_one_process(model, optimizers, step, clips)
        weights.append(copy.deepcopy(model.state_dict()))
    return weights


def prepared(name, make, zero=0, overlap=False, **options):
    plan = PLAN if name == "gated" else None
    model = parallelize(
        plain(name), get_process_group_manager(), plan=plan, **options, rehearse=False
    )
    optimizers = make(model)
    for optimizer in optimizers:
        if zero:
            shard_optimizer(optimizer, model, stage=zero, overlap=overlap)
        whole_matrices(optimizer, model)
    return model, optimizers


def step_on(model, optimizers, step, clips=False):
    train_step(model, shard_global_batch(batch(step), 2, model=model))
    if clips:
        clip_grad_norm_(model, 0.1)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def each_case(sizes, cases):
    """Train as one rank; return the largest error of any weight after the last step of each."""
    with grid(sizes):
        found = []
        for expected, name, make, options in cases:
            clips = options.pop("clips", False)
            model, optimizers = prepared(name, make, **options)
            for step in range(STEPS):
                step_on(model, optimizers, step, clips)
            found.append(gap(full_state_dict(model), expected[-1]))
    return found


def check(sizes, *cases):
    given = [(reference(n, make, o.get("clips", False)), n, make, o) for n, make, o in cases]
    for found in run_ranks(each_case, ranks_of(sizes), sizes, given, timeout=200):
        assert len(found) == len(cases)
        for error, case in zip(found, cases, strict=True):
            assert error < BOUND, (sizes, case)


def test_two_ranks():
    check(
        {"tp_size": 2},
        ("llama", muon, {}),
        ("llama", muon, {"sequence_parallel": True}),
        ("llama", muon, {"clips": True, "recompute": True}),
        ("llama", muon_alone, {}),
        ("gated", muon, {}),
        ("gated", adafactor, {}),
        ("gated", lamb, {}),
        ("llama", shampoo, {}),
    )


def test_with_data_parallel_ranks():
    check(
        {"tp_size": 2, "dp_size": 2},
        ("llama", muon, {}),
        ("llama", muon, {"zero": 1, "clips": True}),
        ("llama", muon, {"zero": 2, "overlap": True}),
        ("gated", lamb, {"zero": 1, "sequence_parallel": False}),
        ("gated", adafactor, {"zero": 2, "bucket_size": 100}),
    )


def test_with_a_pipeline():
    check({"tp_size": 2, "pp_size": 2}, ("llama", muon, {}), ("llama", muon, {"zero": 1}))


def begin(folder, sizes, make, zero):
    with grid(sizes):
        model, optimizers = prepared("llama", make, zero=zero)
        step_on(model, optimizers, 0)
        for number, optimizer in enumerate(optimizers):
            save(f"{folder}/{number}", model, optimizer, step=1)


def go_on(expected, folder, sizes, make, zero):
    with grid(sizes):
        model, optimizers = prepared("llama", make, zero=zero)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.5)  # so that what is not loaded shows
        for number, optimizer in enumerate(optimizers):
            load(f"{folder}/{number}", model, optimizer)
        for step in range(1, STEPS):
            step_on(model, optimizers, step)
        found = full_state_dict(model)
    return gap(found, expected)


LAYOUTS = [
    ({"tp_size": 2, "dp_size": 2}, 2),
    ({"tp_size": 2, "pp_size": 2}, 0),
    ({"tp_size": 4}, 0),
    ({"dp_size": 4}, 1),
]
ALONE = ({}, 0)
MOVES = [
    *((muon, one, other) for one, other in pairwise([*LAYOUTS, LAYOUTS[0]])),
    (muon, LAYOUTS[0], ALONE),
    (muon, ALONE, LAYOUTS[1]),
    (shampoo, LAYOUTS[2], LAYOUTS[0]),  # whose state has other shapes than its matrix
]


@pytest.mark.parametrize(("make", "first", "second"), today(MOVES, 3))
def test_state_goes_on_on_another_layout(tmp_path, make, first, second):
    expected, folder = reference("llama", make)[-1], str(tmp_path)
    run_ranks(begin, ranks_of(first[0]), folder, first[0], make, first[1], timeout=200)
    given = expected, folder, second[0], make, second[1]
    for error in run_ranks(go_on, ranks_of(second[0]), *given, timeout=200):
        assert error < BOUND


def changed_and_refused():
    with grid(tp_size=2):
        model, (optimizer, rest) = prepared("llama", muon)
        owned = [p.numel() for p in optimizer.param_groups[0]["params"]]
        state = optimizer.state_dict()
        assert len(state["whole"]) == len(owned)
        optimizer.load_state_dict(state)
        with pytest.raises(StateError, match=r"shard on one layout; use scaletorch\.check"):
            optimizer.load_state_dict({**state, "whole": ["another"]})
        with pytest.raises(StateError, match="Muon has whole matrices already"):
            whole_matrices(optimizer, model)
        with pytest.raises(StateError, match="takes neither a closure nor a gradient scaler"):
            optimizer.step(lambda: 0.0)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(torch.ones(1))
        with pytest.raises(StateError, match="takes neither a closure nor a gradient scaler"):
            scaler.step(optimizer)
        del optimizer.grad_scale, optimizer.found_inf

        with torch.no_grad():  # owners hear of it
            for name, parameter in model.named_parameters():
                if get_rank() == 1 and "q_proj" in name:
                    parameter.mul_(2.0)
        before = full_state_dict(model)
        optimizer.step(closure=None)  # without gradients it changes nothing
        assert gap(full_state_dict(model), before) == 0
        step_on(model, [optimizer, rest], 0)
        for parameter in model.parameters():
            assert parameter.grad is None
        found = full_state_dict(model)

        twin = plain("llama")
        twin.load_state_dict(before)
        step_in_one_process(twin, muon(twin), 0)
        assert gap(found, twin.state_dict()) < BOUND
    return owned


def test_written_weights_reach_the_owners_and_the_rest_is_refused():
    first, second = run_ranks(changed_and_refused, 2)
    every = [
        p.numel() for n, p in plain("llama").named_parameters() if p.ndim == 2 and "layers." in n
    ]
    assert sorted(first + second) == sorted(every)  # each matrix has one owner
    assert abs(sum(first) - sum(second)) <= max(every)


@distributed_test(world_size=2)
def test_other_optimizers_are_refused_on_every_rank():
    with grid(tp_size=2) as manager:
        model = parallelize(plain("llama"), manager, rehearse=False)
        matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "layers." in n]
        with pytest.raises(MismatchError, match="optimizers of some tensor-parallel ranks have"):
            whole_matrices(torch.optim.Muon(matrices[get_rank() :]), model)
        unlike = (ClippedAll if get_rank() == 0 else Lamb)(model.parameters())
        with pytest.raises((InvalidArgumentError, MismatchError), match=r"looks at several|rank 0"):
            whole_matrices(unlike, model)
        with pytest.raises(InvalidArgumentError, match="ClippedAll looks at several param"):
            whole_matrices(ClippedAll(model.parameters()), model)
        with pytest.raises(InvalidArgumentError, match=r"LBFGS cannot be tried .* takes a closure"):
            whole_matrices(torch.optim.LBFGS(model.parameters()), model)
        step_on(model, [], 0)
        muon_on_shards = torch.optim.Muon(matrices)
        with pytest.raises(InvalidArgumentError, match=r"Muon looks at whole param.*whole_ma"):
            muon_on_shards.step()
        adam = torch.optim.AdamW(model.parameters())
        assert whole_matrices(adam, model) is adam
        assert len(adam.param_groups[0]["params"]) == len(list(model.parameters()))


@distributed_test(world_size=2)
def test_what_looks_at_all_parameters_is_refused_on_a_pipeline():
    with grid(pp_size=2) as manager:
        model = parallelize(plain("llama"), manager, rehearse=False)
        train_step(model, shard_global_batch(batch(0), 2, model=model))
        before = copy.deepcopy(model.state_dict())
        for kind in (ClippedAll, torch.optim.LBFGS):
            with pytest.raises(InvalidArgumentError, match="the stages of a pipeline have o"):
                kind(model.parameters()).step()
        later = ClippedAll([nn.Parameter(torch.ones(1))])  # of no model
        later.param_groups[0]["params"][0].grad = torch.ones(1)
        later.step()
        later.add_param_group({"params": list(model.parameters())})
        with pytest.raises(InvalidArgumentError, match="the stages of a pipeline have o"):
            later.step()
        assert gap(model.state_dict(), before) == 0
        with pytest.raises(InvalidArgumentError, match="ClippedAll cannot be sharded: it"):
            shard_optimizer(ClippedAll(model.parameters()), model)


def counted():
    """Return what a step's all-to-alls hand over to other ranks, and the matrices' bytes."""
    matrices = importlib.import_module("scaletorch.compose.whole_matrices")
    with grid(tp_size=get_world_size()) as manager:
        torch.manual_seed(0)
        sizes = {"vocab_size": 36, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4}
        config = LlamaConfig(**sizes, num_layers=4, num_kv_heads=4)
        model = parallelize(Llama(config), manager, rehearse=False)
        hidden = [p for n, p in model.named_parameters() if p.ndim == 2 and "layers." in n]
        optimizer = whole_matrices(torch.optim.Muon(hidden), model)
        train_step(model, shard_global_batch(batch(0), 1, model=model))
        sent, original = [], matrices.all_to_all_flat

        def counting(data, counts, *rest):
            sent.append((sum(counts) - counts[manager.tp_rank]) * data.itemsize)
            return original(data, counts, *rest)

        matrices.all_to_all_flat = counting
        optimizer.step()
        matrices.all_to_all_flat = original
    return sent, sum(p.nbytes for p in hidden)


def test_bytes_are_what_the_guide_says():
    if not GUIDE.exists():
        pytest.skip("the guide is in the repository alone")
    (line,) = [each for each in GUIDE.read_text().splitlines() if "`whole_matrices`" in each]
    _, most, total = re.findall("`([^`]+)`", line)
    size = 4
    found = run_ranks(counted, size)
    whole = sum(own for _, own in found)
    assert all(len(sent) == 2 for sent, _ in found)  # two messages
    known = {"P": whole, "N": size}
    # An element for each matrix and rank, which says whether it has a gradient.
    assert max(sum(sent) for sent, _ in found) == pytest.approx(eval(most, known), rel=0.1)
    assert sum(sum(sent) for sent, _ in found) == pytest.approx(eval(total, known), rel=0.01)
