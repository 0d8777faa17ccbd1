"""Pairs of dualpipe_v with experts: exchanges of one action pass while the other one computes."""

import copy
import time

import pytest
import torch
from torch import nn

from scaletorch import compose
from scaletorch.compose.forward import pipeline_of
from scaletorch.dist import RankFaultError, get_rank, guard
from scaletorch.dist.testing import relative_error, run_ranks
from scaletorch.models import Mixture, MixtureConfig
from scaletorch.parallel.expert_parallel import travel
from scaletorch.parallel.pg_manager import (
    destroy_process_group_manager,
    setup_process_group_manager,
)
from scaletorch.parallel.pipeline_parallel.runtime.baton import Baton

BOUND = 1e-11
SIZES = {"dp_size": 2, "pp_size": 2, "ep_size": 2}
CONFIG = MixtureConfig(
    vocab_size=40, hidden_size=16, intermediate_size=12, num_layers=4, num_experts=4
)


def build():
    torch.manual_seed(1)
    return Mixture(CONFIG).double()


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


def as_one_process(expected):
    manager = setup_process_group_manager(**SIZES)
    for recompute in (False, True):
        model = compose.parallelize(build(), manager, schedule="dualpipe_v", recompute=recompute)
        overlapped = list(steps(model))
        pipeline_of(model).runtime.switching = None
        alone = list(steps(model))
        for (loss, grads, norm), one, (true_loss, true) in zip(overlapped, alone, expected, strict=True):
            assert relative_error(loss, true_loss) < BOUND
            assert grads.keys() == true.keys()
            for name, gradient in true.items():
                assert relative_error(grads[name], gradient) < BOUND, name
                assert torch.equal(grads[name], one[1][name]), name
            whole = torch.stack([g.norm() for g in true.values()]).norm()
            assert relative_error(norm, whole) < BOUND
            assert torch.equal(loss, one[0]) and torch.equal(norm, one[2])
    destroy_process_group_manager()


def test_as_one_process_and_as_one_after_another():
    run_ranks(as_one_process, 4, reference(), timeout=120)
