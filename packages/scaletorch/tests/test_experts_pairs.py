"""Pairs of dualpipe_v with experts: exchanges of one action pass while the other one computes."""

import copy
import threading
import traceback
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from scaletorch import compose, guard
from scaletorch.compose.forward import pipeline_of
from scaletorch.dist import RankFaultError, get_rank, recv
from scaletorch.dist.testing import relative_error, run_ranks
from scaletorch.models import Mixture, MixtureConfig
from scaletorch.models.llama import rotary_tables
from scaletorch.parallel.pg_manager import (
    destroy_process_group_manager,
    setup_process_group_manager,
)
from scaletorch.parallel.pipeline_parallel import StageError
from scaletorch.parallel.pipeline_parallel.runtime import execute

BOUND = 1e-11
SIZES = {"dp_size": 2, "pp_size": 2, "ep_size": 2}
CONFIG = MixtureConfig(
    vocab_size=40, hidden_size=16, intermediate_size=12, num_layers=4, num_experts=4
)


class Recomputed(Mixture):
    """All layers are recomputed in one go, also those that are on other stages."""

    def forward(self, input_ids):
        hidden = self.embed_tokens(input_ids)
        hidden = checkpoint(self.through, hidden, use_reentrant=False)
        return self.lm_head(self.norm(hidden))

    def through(self, hidden):
        positions = torch.arange(hidden.shape[1])[None]
        tables = rotary_tables(positions, 2, CONFIG.rope_theta, hidden.dtype)
        for layer in self.layers:
            hidden = layer(hidden, *tables)
        return hidden


def build(drops=False, kind=Mixture):
    torch.manual_seed(1)
    model = kind(CONFIG).double()
    for layer in model.layers if drops else ():
        layer.mlp = nn.Sequential(nn.Dropout(0.3), layer.mlp, nn.Dropout(0.3))
    return model


def batch(step):
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, 40, (8, 9), generator=generator)
    return {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}


def reference():
    """Losses and gradients of two steps of one process."""
    model, found = build(), []
    for step in range(2):
        whole = batch(step)
        loss = nn.functional.cross_entropy(
            model(whole["input_ids"]).flatten(0, 1), whole["labels"].flatten()
        )
        model.zero_grad()
        loss.backward()
        found.append((loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters()}))
    return found


def steps(model):
    """Yield each step's loss, gradients and norm."""
    for step in range(2):
        model.zero_grad()
        some = compose.shard_global_batch(batch(step), 4, model=model)
        loss = compose.train_step(model, some)
        yield loss, copy.deepcopy(compose.full_gradients(model)), compose.global_grad_norm(model)


def in_both_ways(model, expected):
    """Train in pairs and one after another: the same bits, those of one process to rounding."""
    runtime, heard = pipeline_of(model).runtime, ([], [])

    def noting(number):
        return lambda text: heard[number].append((text, threading.current_thread()))

    generator = torch.get_rng_state()
    with guard.listening(noting(0)):
        together = list(steps(model))
    drawn = torch.get_rng_state()
    switching, runtime.switching = runtime.switching, None
    torch.set_rng_state(generator)
    with guard.listening(noting(1)):
        alone = list(steps(model))
    runtime.switching = switching
    assert torch.equal(torch.get_rng_state(), drawn)
    for (loss, grads, norm), (other, others, other_norm) in zip(together, alone, strict=True):
        assert torch.equal(loss, other)
        assert torch.equal(norm, other_norm)
        assert grads.keys() == others.keys()
        assert all(torch.equal(grads[name], others[name]) for name in grads)
    for (loss, grads, norm), (true_loss, true) in zip(together, expected, strict=False):
        assert relative_error(loss, true_loss) < BOUND
        assert grads.keys() == true.keys()
        for name, gradient in true.items():
            assert relative_error(grads[name], gradient) < BOUND, name
        whole = torch.stack([gradient.norm() for gradient in true.values()]).norm()
        assert relative_error(norm, whole) < BOUND
    return heard


def exchanges(heard):
    """Return what was told of exchanges, and how often another thread made the next one."""
    told = [each for each in heard if "all_to_all" in each[0]]
    turns = sum(one[1] is not other[1] for one, other in pairwise(told))
    return [text for text, _ in told], turns


def trains(expected):
    manager = setup_process_group_manager(**SIZES)
    for recompute in (False, True):
        model = compose.parallelize(
            build(), manager, schedule="dualpipe_v", recompute=recompute, rehearse=False
        )
        (together, turns), (alone, none) = map(exchanges, in_both_ways(model, expected))
        assert sorted(together) == sorted(alone)
        # A rank has 6 pairs or more; on two threads one after another, each would take two turns.
        assert turns >= 6 * 4
        assert none == 0
        assert all(text.endswith(" in steps") for text in together)  # who made them, on any thread
        # Draws before and behind exchanges: what recomputes and what goes forward draw in turn.
        plan = {"**.experts": "experts"}
        torch.manual_seed(get_rank())
        model = compose.parallelize(
            build(drops=True),
            manager,
            schedule="dualpipe_v",
            recompute=recompute,
            plan=plan,
            rehearse=False,
        )
        in_both_ways(model, ())
    in_both_ways(
        compose.parallelize(build(kind=Recomputed), manager, schedule="dualpipe_v", rehearse=False),
        expected,
    )
    destroy_process_group_manager()


def test_in_pairs_as_one_after_another_and_as_one_process():
    run_ranks(trains, 4, reference(), timeout=200)


class Bug(Exception):
    pass


def at_turn(model, thread, call):
    """Call something in a step's third pair, from a forward or, on its thread, from a backward."""
    runtime, pairs = pipeline_of(model).runtime, []
    switching = runtime.switching

    def counted(hand_over):
        pairs.append(0)
        return switching(hand_over)

    def hook(*_):
        if len(pairs) == 3 and (threading.current_thread() is threading.main_thread()) == thread:
            pairs.append(0)
            call()

    runtime.switching = counted
    for layer in pipeline_of(model).module.modules():
        if type(layer).__name__ == "SparseMLP":
            layer.experts.register_forward_hook(hook)
            layer.experts.register_full_backward_hook(hook)
    return pairs


def fails():
    raise Bug("mine")


def fails_on_all(main):
    """All ranks of the first stages fail; the model trains on.

    One pipeline would hear of it at once, and the other one never: ranks of one stage that left
    the step at different tasks would wait for one another.
    """
    manager = setup_process_group_manager(**SIZES)
    model = compose.parallelize(build(), manager, schedule="dualpipe_v", rehearse=False)
    before = next(steps(model))
    execute.PERIOD = 0 if manager.dp_rank == 0 else 60
    first = manager.pp_rank == 0
    if first:
        at_turn(model, main, fails)
    with pytest.raises(Bug if first else StageError, match="mine") as raised:
        next(steps(model))
    names = {frame.name for frame in traceback.extract_tb(raised.value.__traceback__)}
    if first:
        assert {"fails", "fails_on_all", "_forward" if main else "_backward"} <= names
    else:
        assert f"failed in {'F' if main else 'B'}" in str(raised.value)
    after = next(steps(model))
    assert torch.equal(before[0], after[0])
    assert all(torch.equal(after[1][name], each) for name, each in before[1].items())
    assert threading.active_count() == 1
    destroy_process_group_manager()


@pytest.mark.parametrize("main", [True, False])
def test_what_all_ranks_of_a_stage_raise_leaves_nobody_waiting(main):
    run_ranks(fails_on_all, 4, main, timeout=200)


def waits_for_nothing():
    """Wait for a message that never comes, on whichever thread."""
    recv(torch.empty(1), get_rank() ^ 2)


def guarded(main, call):
    manager = setup_process_group_manager(**SIZES)
    model = compose.parallelize(build(), manager, schedule="dualpipe_v", rehearse=False)
    if get_rank() == 1:
        at_turn(model, main, call)
    try:
        with guard.watch():
            for _ in steps(model):
                guard.step()
    except (RankFaultError, Bug) as error:
        names = {frame.name for frame in traceback.extract_tb(error.__traceback__)}
        return type(error).__name__, getattr(error, "kind", ""), str(error), call.__name__ in names
    return None


@pytest.mark.parametrize("main", [True, False])
def test_under_a_guard_one_rank_that_raises_ends_all(main):
    for rank, (name, kind, text, here) in enumerate(run_ranks(guarded, 4, main, fails)):
        if rank == 1:
            assert (name, text, here) == ("Bug", "mine", True)
        else:
            assert (name, kind) == ("RankFaultError", "exception")
            assert "rank 1" in text
            assert "Bug: mine" in text


@pytest.mark.parametrize("main", [True, False])
def test_the_guard_names_a_call_that_hangs_in_a_pair(main):
    for name, kind, text, _ in run_ranks(guarded, 4, main, waits_for_nothing, timeout=200):
        assert (name, kind) == ("RankFaultError", "cycle")
        assert "recv(float32[1]) from rank 3" in text
        assert "test_experts_pairs.py" in text
