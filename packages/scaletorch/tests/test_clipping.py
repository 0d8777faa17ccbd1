"""Clipping as people write it, on ranks that have a shard or a stage: warned of, or right."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from small_decoder import CP, DP, PLAN, PP, TP, V, batch, made
from torch import nn

from scaletorch.compose import clip_grad_norm_, full_state_dict, parallelize, shard_global_batch
from scaletorch.compose.step import train_step
from scaletorch.dist.errors import MismatchError, StateError
from scaletorch.dist.testing import relative_error, run_ranks
from scaletorch.parallel.data_parallel import shard_optimizer
from scaletorch.parallel.pg_manager import (
    destroy_process_group_manager,
    setup_process_group_manager,
)


def theirs(model):
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def ours(model):
    clip_grad_norm_(model, 0.01)


def values(model):
    chosen = [p for name, p in model.named_parameters() if name == "embed.weight"]
    if chosen:  # a stage may have none
        nn.utils.clip_grad_value_(chosen, 0.01)


def nothing(_):
    pass


def one_process(change, sparse=False):
    model = made()
    model.embed.sparse = sparse
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    for step in range(2):
        given = batch(step)
        logits = model(given["input_ids"])
        F.cross_entropy(logits.flatten(0, 1), given["labels"].flatten()).backward()
        if change is ours:
            grads = [p.grad.to_dense() for p in model.parameters()]
            norm = nn.utils.get_total_norm(grads)
            nn.utils.clip_grads_with_norm_(model.parameters(), 0.01, norm)
        else:
            change(model)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def train(change, sizes, zero=0, sparse=False, **options):
    """Return what was warned of, and the largest error of a weight."""
    manager = setup_process_group_manager(**sizes)
    if manager.tp_size > 1:
        options["plan"] = {n: s for n, s in PLAN.items() if not (sparse and n == "embed")}
    plain = made()
    plain.embed.sparse = sparse
    model = parallelize(plain, manager, **options, rehearse=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    if zero:
        shard_optimizer(optimizer, model, stage=zero)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for step in range(2):
            train_step(model, shard_global_batch(batch(step), 2, manager))
            change(model)
            optimizer.step()
            optimizer.zero_grad()
    now, wanted = full_state_dict(model), one_process(change, sparse)
    destroy_process_group_manager()
    error = max(float(relative_error(now[name], value)) for name, value in wanted.items())
    return [str(each.message) for each in said], error


def check_clipping():
    v = dict([V])
    for sizes, options in ((TP, {}), (PP, {}), (PP, v)):
        with pytest.raises(MismatchError, match=r"use scaletorch.compose.clip_grad_norm_\(model,"):
            train(theirs, sizes, **options)
        destroy_process_group_manager()
        for change in (ours, values, nothing):
            said, error = train(change, sizes, **options)
            assert not said, (change, sizes, said)
            assert error < 1e-12, (change, sizes, error)
    for sizes, options in ((DP, {}), (CP, {})):  # gradients are whole there
        said, error = train(theirs, sizes, **options)
        assert not said, (sizes, said)
        assert error < 1e-12, (sizes, options, error)


def test_torchs_clipping_is_refused_where_ranks_have_other_norms():
    run_ranks(check_clipping, 2, timeout=200)


def check_sparse():
    for sizes, options in ((TP, {}), (PP, {}), (PP, dict([V]))):
        for change in (ours, nothing):
            said, error = train(change, sizes, sparse=True, **options)
            assert not said
            assert error < 1e-12, (sizes, change, error)


def test_sparse_gradients_are_clipped_by_the_norm_of_the_whole():
    run_ranks(check_sparse, 2, timeout=200)


def check_zero():
    for stage in (1, 2):
        with pytest.raises(StateError, match=r"clip with clip_grad_norm_ of scaletorch"):
            train(theirs, DP, zero=stage)
        destroy_process_group_manager()


def test_zero_refuses_torchs_clipping_of_gradients_in_shards():
    run_ranks(check_zero, 2, timeout=200)
