"""A pipeline of real ranks trains as one process that accumulates the same micro-batches."""

from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from one_process import Wrapper, build, require_same, serial, split
from torch import nn
from torch.utils.checkpoint import checkpoint

from scaletorch.dist.testing import distributed_test, run_ranks
from scaletorch.parallel.pipeline_parallel import (
    SCHEDULES,
    pipeline_forward,
    train_step_pipeline,
    train_step_pipeline_1f1b,
    train_step_pipeline_afab,
)

TRAINING = [name for name in SCHEDULES if name != "forward_only"]
BATCH, LENGTH, HIDDEN, VOCAB = 2, 5, 8, 16
SHAPE = (BATCH, LENGTH, HIDDEN)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(HIDDEN)
        self.qkv_proj = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)
        self.o_proj = nn.Linear(HIDDEN, HIDDEN)
        self.post_layernorm = nn.RMSNorm(HIDDEN)
        self.gate_up_proj = nn.Linear(HIDDEN, 4 * HIDDEN, bias=False)
        self.down_proj = nn.Linear(2 * HIDDEN, HIDDEN, bias=False)

    def forward(self, x, cos, sin):
        heads = self.qkv_proj(self.input_layernorm(x)).unflatten(-1, (6, -1)).transpose(1, 2)
        q, k, v = heads.chunk(3, dim=1)
        q, k = (h * cos + torch.cat((-h[..., 1::2], h[..., ::2]), -1) * sin for h in (q, k))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o_proj(out.transpose(1, 2).flatten(2))
        gate, up = self.gate_up_proj(self.post_layernorm(x)).chunk(2, dim=-1)
        return x + self.down_proj(F.silu(gate) * up)


class Rotary(nn.Module):
    def forward(self, x, position_ids):
        angles = position_ids[:, None, :, None] * torch.tensor([1.0, 0.1, 1.0, 0.1])
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


class Llama(nn.Module):
    def __init__(self, tied=False, recompute=False):
        super().__init__()
        self.recompute = recompute
        self.embed_tokens = nn.Embedding(VOCAB, HIDDEN)
        self.rotary = Rotary()
        self.layers = nn.ModuleList(Block() for _ in range(8))
        self.norm = nn.RMSNorm(HIDDEN)
        self.lm_head = nn.Linear(HIDDEN, VOCAB, bias=False)
        if tied:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, input_ids, position_ids):
        x = self.embed_tokens(input_ids)
        cos, sin = self.rotary(x, position_ids)
        for layer in self.layers:
            if self.recompute:
                x = checkpoint(layer, x, cos, sin, use_reentrant=False)
            else:
                x = layer(x, cos, sin)
        return self.lm_head(self.norm(x))


def make_batches(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for index in range(count):
        tokens = torch.randint(VOCAB, (BATCH, LENGTH + 1), generator=generator)
        labels = tokens[:, 1:].clone()
        labels[0, : index % LENGTH] = -100
        positions = torch.arange(LENGTH).expand(BATCH, -1) + index
        batches.append({"input_ids": tokens[:, :-1], "labels": labels, "position_ids": positions})
    return batches


TIED = ("embed_tokens.weight", "lm_head.weight")


def compare(schedule, count, tied):
    """Compare a step and its outputs with one process; return this rank's parameters' names."""
    plain, batches = build(Llama, tied=tied), make_batches(count)
    stage = split(plain, schedule)
    wrapper = Wrapper(Wrapper(stage))
    expected = serial(plain, batches)
    with (
        patch.object(torch.autograd.profiler, "_is_profiler_enabled", True),
        patch.object(torch.profiler, "record_function", side_effect=nullcontext) as ranges,
    ):
        loss = train_step_pipeline(wrapper, iter(batches))
    assert torch.equal(loss, expected if stage.is_last_stage else torch.zeros_like(loss))
    assert loss.dtype == torch.float64
    assert not loss.requires_grad
    require_same(stage, plain, exact=True, summed=TIED if tied else ())
    own = SCHEDULES[schedule](len(stage.ranks), count).ranks[stage.rank]
    shown = [each.args[0] for each in ranges.call_args_list]
    assert shown == [f"{a} of stage {stage.stages[a.chunk]}" for a in own]
    backwards = sum(action.kind != "F" for action in own)
    for each in (wrapper, wrapper.module):
        assert each.synced == [False] * (backwards - 1) + [True]
    assert wrapper.require_backward_grad_sync
    outputs = pipeline_forward(wrapper, batches)
    assert len(outputs) == (count if stage.is_last_stage else 0)
    for output, batch in zip(outputs, batches, strict=False):
        assert torch.equal(output, plain(batch["input_ids"], position_ids=batch["position_ids"]))
    return [name for name, _ in stage.named_parameters()]


def compare_all(schedules):
    """Compare schedules, tied and not, with few, odd and many micro-batches."""
    names = {}
    for index, schedule in enumerate(schedules):
        odd = index % 2 > 0
        for count, tied in ((1 + index % 3, odd), (3, not odd), (6, odd)):
            names[schedule, tied] = compare(schedule, count, tied)
    return names


@pytest.mark.parametrize(
    ("pp_size", "schedules"),
    [(1, TRAINING), (2, TRAINING), (3, ["1f1b", "zb_v"]), (4, ["interleaved_1f1b", "zb_h1"])],
)
def test_equals_one_process(pp_size, schedules):
    here = pp_size == 1
    ranks = [compare_all(schedules)] if here else run_ranks(compare_all, pp_size, schedules)
    plain = {name for name, _ in Llama().named_parameters()}
    for schedule, tied in ranks[0]:
        names = [name for rank in ranks for name in rank[schedule, tied]]
        together = pp_size == 1 or schedule in ("zb_v", "dualpipe_v")  # embedding and head
        assert set(names) == plain - ({"lm_head.weight"} if tied and together else set())
        assert len(names) == len(set(names))  # each on one rank; 8 layers on 3 ranks too


@distributed_test(world_size=2)
def test_the_documented_calls_and_recomputed_layers():
    for step in (train_step_pipeline_afab, train_step_pipeline_1f1b):
        plain, batches = build(Llama, recompute=step is train_step_pipeline_1f1b), make_batches(4)
        stage = split(plain)
        serial(plain, batches)
        step(stage, batches, SHAPE, "cpu", torch.float64)
        require_same(stage, plain, exact=True)


@distributed_test(world_size=2)
def test_autocast_around_the_step():
    """With the bits of one process, if hidden states travel as they are."""
    for schedule in ("1f1b", "interleaved_1f1b", "zb_v"):
        plain, batches = build(Llama).float(), make_batches(5)
        stage = split(plain, schedule)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            serial(plain, batches)
            loss = train_step_pipeline(stage, batches)
        assert loss.dtype == torch.float32
        require_same(stage, plain, exact=True)


@distributed_test(world_size=2)
def test_a_loss_that_is_nan_passes_through():
    stage, batches = split(build(Llama)), make_batches(3)

    def loss_fn(output, batch):
        return output.sum() * (float("nan") if batch is batches[1] else 1.0)

    total = train_step_pipeline(stage, batches, loss_fn=loss_fn)
    assert total.isnan() if stage.is_last_stage else total == 0
