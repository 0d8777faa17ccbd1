"""A pipeline of real ranks trains as one process that accumulates the same micro-batches."""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from scaletorch.dist.testing import run_ranks
from scaletorch.parallel.pipeline_parallel import (
    SCHEDULES,
    PipelineParallel,
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
        self.o_proj = nn.Linear(HIDDEN, HIDDEN, bias=False)
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
    def __init__(self, num_layers=8, tied=False, recompute=False):
        super().__init__()
        self.recompute = recompute
        self.embed_tokens = nn.Embedding(VOCAB, HIDDEN)
        self.rotary = Rotary()
        self.layers = nn.ModuleList(Block() for _ in range(num_layers))
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


class ShapesOfIds(Llama):
    """Its shapes are those of ids, and hidden states have a name of their own."""

    def forward(self, input_ids=None, position_ids=None, inputs_embeds=None):
        shape = inputs_embeds.shape[:-1] if input_ids is None else input_ids.shape
        x = self.embed_tokens(input_ids.view(shape)) if inputs_embeds is None else inputs_embeds
        cos, sin = self.rotary(x, position_ids)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.lm_head(self.norm(x).view(*shape, HIDDEN))


class PassesOn(ShapesOfIds):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


class ByPosition(ShapesOfIds):
    def forward(self, input_or_hidden, **kwargs):
        name = "inputs_embeds" if input_or_hidden.is_floating_point() else "input_ids"
        return super().forward(**{name: input_or_hidden}, **kwargs)


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


def serial_step(model, batches):
    """What one process does: accumulate the micro-batches in order; returns the loss."""
    count = sum((b["labels"] != -100).sum() for b in batches)
    total = torch.zeros((), dtype=torch.float64)
    for batch in batches:
        logits = model(batch["input_ids"], position_ids=batch["position_ids"])
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
        (loss / count).backward()
        total += (loss / count).detach()
    return total


def make_models(**options):
    torch.manual_seed(0)
    model = Llama(**options).double()
    return model, copy.deepcopy(model)


def compare_all(tied, schedules):
    """Compare schedules and numbers of micro-batches with one process; return names seen.

    A tie is summed at the end of a step, whatever came before: it sees few, an odd number and many.
    """
    world = torch.distributed.group.WORLD
    for schedule, count in itertools.product(schedules, (1, 3, 6) if tied else range(1, 7)):
        plain, model = make_models(tied=tied)
        stage = PipelineParallel(model, group=world, schedule=schedule)
        batches = make_batches(count)
        expected = serial_step(plain, batches)
        loss = train_step_pipeline(stage, iter(batches))
        assert torch.equal(loss, expected if stage.is_last_stage else torch.zeros_like(loss))
        assert loss.dtype == torch.float64
        assert not loss.requires_grad
        check_parameters(stage, plain, exact=not tied)
    return [name for name, _ in stage.named_parameters()]


def check_parameters(stage, plain, exact=True):
    references = dict(plain.named_parameters(remove_duplicate=False))
    for name, parameter in stage.named_parameters():
        reference = references[name]
        tied = name in ("embed_tokens.weight", "lm_head.weight")
        if exact or not tied:
            assert torch.equal(parameter.grad, reference.grad), name
        torch.testing.assert_close(parameter.grad, reference.grad, rtol=1e-12, atol=1e-14)
        stepped = parameter.detach() - 0.1 * parameter.grad
        torch.testing.assert_close(
            stepped, reference.detach() - 0.1 * reference.grad, rtol=1e-12, atol=1e-14
        )


@pytest.mark.parametrize("schedules", [TRAINING[:3], TRAINING[3:5], TRAINING[5:]])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("pp_size", [1, 2, 3, 4])
def test_equals_one_process(pp_size, tied, schedules):
    ranks = run_ranks(compare_all, pp_size, tied, schedules)
    names = [name for names in ranks for name in names]
    plain = {name for name, _ in Llama().named_parameters()}
    together = pp_size == 1 or schedules[-1] == "dualpipe_v"  # embedding and head on one rank
    assert set(names) == plain - ({"lm_head.weight"} if tied and together else set())
    assert len(names) == len(set(names))  # each plain name on one rank; 8 layers on 3 ranks too


def as_documented():
    for step in (train_step_pipeline_afab, train_step_pipeline_1f1b):
        plain, model = make_models()
        stage = PipelineParallel(model, group=torch.distributed.group.WORLD)
        batches = make_batches(4)
        serial_step(plain, batches)
        step(stage, batches, SHAPE, "cpu", torch.float64)
        check_parameters(stage, plain)


def test_the_documented_calls():
    run_ranks(as_documented, 2)


def recomputed():
    plain, model = make_models(recompute=True)
    stage = PipelineParallel(model, group=torch.distributed.group.WORLD)
    batches = make_batches(4)
    serial_step(plain, batches)
    train_step_pipeline_1f1b(stage, batches, SHAPE, "cpu", torch.float64)
    references = dict(plain.named_parameters())
    for name, parameter in stage.named_parameters():
        assert torch.equal(parameter.grad, references[name].grad)


def test_recomputed_layers():
    run_ranks(recomputed, 2)


def named_embeds(kind):
    torch.manual_seed(0)
    plain = kind().double()
    stage = PipelineParallel(copy.deepcopy(plain), group=torch.distributed.group.WORLD)
    batches = make_batches(3)
    serial_step(plain, batches)
    train_step_pipeline_1f1b(stage, batches, SHAPE, "cpu", torch.float64)
    references = dict(plain.named_parameters())
    for name, parameter in stage.named_parameters():
        assert torch.equal(parameter.grad, references[name].grad)


@pytest.mark.parametrize("kind", [ShapesOfIds, PassesOn, ByPosition])
def test_hidden_states_as_inputs_embeds(kind):
    run_ranks(named_embeds, 2, kind)


def autocast(wire_dtype):
    torch.manual_seed(0)
    plain = Llama()
    model = copy.deepcopy(plain)
    stage = PipelineParallel(model, group=torch.distributed.group.WORLD)
    batches = make_batches(3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        serial_step(plain, batches)
        loss = train_step_pipeline_1f1b(stage, batches, SHAPE, "cpu", wire_dtype)
    assert loss.dtype == torch.float32
    references = dict(plain.named_parameters())
    for name, parameter in stage.named_parameters():
        error = (parameter.grad - references[name].grad).norm() / references[name].grad.norm()
        assert error < 0.05, name


@pytest.mark.parametrize("wire_dtype", [torch.float32, torch.bfloat16])
def test_autocast_around_the_step(wire_dtype):
    run_ranks(autocast, 2, wire_dtype)


def autocast_alike():
    for schedule in TRAINING:
        torch.manual_seed(0)
        plain = Llama()
        world = torch.distributed.group.WORLD
        stage = PipelineParallel(copy.deepcopy(plain), group=world, schedule=schedule)
        batches = make_batches(5)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            serial_step(plain, batches)
            train_step_pipeline(stage, batches)
        references = dict(plain.named_parameters())
        for name, parameter in stage.named_parameters():
            assert torch.equal(parameter.grad, references[name].grad), (schedule, name)


def test_autocast_has_the_bits_of_one_process():
    run_ranks(autocast_alike, 2)


def frozen(prefixes):
    plain, model = make_models()
    for module in (plain, model):
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(not name.startswith(prefixes))
    stage = PipelineParallel(model, group=torch.distributed.group.WORLD)
    batches = make_batches(3)
    serial_step(plain, batches)
    train_step_pipeline_1f1b(stage, batches, SHAPE, "cpu", torch.float64)
    references = dict(plain.named_parameters())
    for name, parameter in stage.named_parameters():
        expected = references[name].grad
        assert (parameter.grad is None) == (expected is None)
        assert expected is None or torch.equal(parameter.grad, expected)


@pytest.mark.parametrize("prefixes", [("embed", "layers.0", "layers.1", "layers.2", "layers.3"),
                                      ("layers.4", "layers.5", "layers.6", "layers.7", "norm",
                                       "lm_head")])  # fmt: skip
def test_a_frozen_stage(prefixes):
    run_ranks(frozen, 2, prefixes)


def nan_loss():
    _, model = make_models()
    stage = PipelineParallel(model, group=torch.distributed.group.WORLD)
    batches = make_batches(3)

    def loss_fn(output, batch):
        return output.sum() * (float("nan") if batch is batches[1] else 1.0)

    step = train_step_pipeline_1f1b
    return step(stage, batches, SHAPE, "cpu", torch.float64, loss_fn=loss_fn).item()


def test_a_loss_that_is_nan_passes_through():
    first, last = run_ranks(nan_loss, 2)
    assert first == 0
    assert last != last
