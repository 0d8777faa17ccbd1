"""What one rank alone must refuse after the first step reaches every rank, in the step itself.

`refusals` has what is the same on every layout.
"""

from __future__ import annotations

import math
import re
from contextlib import nullcontext

import pytest
import torch
from training import llama, tokens

from scaletorch.compose import parallelize, shard_global_batch, train_step
from scaletorch.dist import get_rank
from scaletorch.dist.errors import ScaletorchError
from scaletorch.dist.testing import preload, run_ranks
from scaletorch.parallel.pg_manager import (
    destroy_process_group_manager,
    setup_process_group_manager,
)

SIZES = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24}
GUILTY = 1


@pytest.fixture(scope="module", autouse=True)
def _imports():
    preload("transformers.models.llama.modeling_llama")


def theirs():
    from transformers import LlamaConfig as Config
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    config = Config(num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, **SIZES)
    config.tie_word_embeddings, config.use_cache = False, False
    return LlamaForCausalLM(config)


def nothing(model, batches):
    return nullcontext()


def zeros_in_a_mask(model, batches):
    batches[0]["attention_mask"][:, 0] = 0
    return nullcontext()


def positions_that_restart(model, batches):
    ids = batches[0]["position_ids"] = batches[0]["position_ids"].clone()
    ids[:, 2:] -= int(ids[0, 2])
    return nullcontext()


def a_gradient(model, batches):
    batches[0]["input_ids"] = batches[0]["input_ids"].float().requires_grad_()
    return nullcontext()


def labels_of_numbers(model, batches):
    batches[0]["labels"] = batches[0]["labels"].float()
    return nullcontext()


def no_micro_batch(model, batches):
    batches.clear()
    return nullcontext()


def told(layout, changes, make):
    """Return what a rank hears of each change that the guilty rank alone makes."""
    manager = setup_process_group_manager(**layout)
    heard = []
    for change in changes:
        model, whole = parallelize(make(), manager, rehearse=False), tokens(length=16)
        if make is theirs:
            whole |= {
                "attention_mask": torch.ones_like(whole["input_ids"]),
                "position_ids": torch.arange(16).expand(4, 16),
            }
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            batches = shard_global_batch(whole, 1, manager)
            mine = change if step == 2 and get_rank() == GUILTY else nothing
            try:
                with mine(model, batches):
                    train_step(model, batches, manager)
                optimizer.step()
                optimizer.zero_grad()
            except ScaletorchError as error:
                heard.append((step, f"{type(error).__name__}: {error}"))
                break
        else:
            heard.append((None, "trained on"))
    destroy_process_group_manager()
    return heard


PLAIN = {
    a_gradient: "input_ids of micro-batch 0 requires grad",
    labels_of_numbers: "labels .* integer",
    no_micro_batch: "no micro-batches",
}
MASKED = {
    zeros_in_a_mask: "attention_mask must hold no zeros",
    positions_that_restart: "position_ids are not those of this rank's zigzag shard",
}
LAYOUTS = [{"tp_size": 2}, {"cp_size": 2}, {"dp_size": 2, "pp_size": 2}]


def name(layout):
    return "_".join(f"{axis[:2]}{size}" for axis, size in layout.items())


def check(heard_by_rank, changes):
    for rank, heard in enumerate(heard_by_rank):
        for (change, match), (step, text) in zip(changes.items(), heard, strict=True):
            assert step == 2, (rank, change, text)
            assert re.search(match, text), (rank, change, text)
            if rank != GUILTY:
                assert "rank 1 cannot take part in this step" in text


@pytest.mark.parametrize("layout", LAYOUTS, ids=name)
def test_every_rank_hears_of_it(layout):
    ranks = math.prod(layout.values())
    check(run_ranks(told, ranks, layout, list(PLAIN), llama, timeout=200), PLAIN)


def test_every_rank_hears_of_masks_and_positions():
    check(run_ranks(told, 2, {"cp_size": 2}, list(MASKED), theirs, timeout=200), MASKED)
