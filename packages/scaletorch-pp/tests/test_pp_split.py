"""Where a model is cut: inference, description, refusals, and what is left on a stage."""

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from scaletorch.dist import InvalidArgumentError
from scaletorch.parallel.pipeline_parallel import (
    PassThrough,
    PipelineParallel,
    Split,
    distribute_layers,
    infer_split,
)


class Rotary(nn.Module):
    def forward(self, x):
        return torch.arange(x.shape[1])


class Block(nn.Module):
    def __init__(self, num_experts=2):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(num_experts))


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(8, 4)
        self.dropout = nn.Dropout(0.5)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(4, elementwise_affine=False)
        self.rotary_emb = Rotary()


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = Inner()
        self.lm_head = nn.Linear(4, 8)


class TwoLists(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.ModuleList([nn.Linear(4, 4)])
        self.decoder = nn.ModuleList([nn.Linear(4, 4)])


SPLIT = Split(
    first=("model.embed_tokens", "model.dropout"),
    layers="model.layers",
    last=("model.norm", "lm_head"),
)


@given(st.integers(1, 200), st.integers(1, 200))
def test_all_layers_are_kept_in_order(num_layers, pp_size):
    if pp_size > num_layers:
        with pytest.raises(InvalidArgumentError, match=f"from 1 to {num_layers}$"):
            distribute_layers(num_layers, pp_size)
        return
    ranges = distribute_layers(num_layers, pp_size)
    assert [index for part in ranges for index in part] == list(range(num_layers))
    lengths = [len(part) for part in ranges]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] - lengths[-1] <= 1


def test_eight_layers_on_three_stages():
    assert distribute_layers(8, 3) == [range(3), range(3, 6), range(6, 8)]


@pytest.mark.parametrize("pp_size", [0, -1])
def test_no_stages(pp_size):
    with pytest.raises(InvalidArgumentError, match="from 1 to 4"):
        distribute_layers(4, pp_size)


def test_inference_at_any_depth():
    assert infer_split(Outer()) == SPLIT


def test_ambiguous_layers():
    with pytest.raises(InvalidArgumentError, match=r"has encoder, decoder; pass Split\(first="):
        infer_split(TwoLists())


def test_no_layers():
    with pytest.raises(InvalidArgumentError, match=r"Linear has none; pass Split\("):
        infer_split(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("split", "text"),
    [
        (Split(("model.embed",), "model.layers"), "'model.embed', .* it has model.embed_tokens, "),
        (Split((), "layers"), "'layers', which the model does not have; it has model, lm_head"),
        (Split(("lm_head",), "model.layers", ("lm_head",)), "twice: 'lm_head' and 'lm_head'"),
        (Split(("model.layers.0",), "model.layers"), "twice: 'model.layers.0' and 'model.layers'"),
        (Split((), "lm_head"), r"must name an nn\.ModuleList, .* it is a Linear"),
        (Split(("model.embed_tokens",), "model.layers"), "does not name: lm_head; add each"),
    ],
)
def test_descriptions_that_do_not_fit(split, text):
    with pytest.raises(InvalidArgumentError, match=text):
        PipelineParallel(Outer(), split)


def test_config_and_model_of_a_wrong_type():
    with pytest.raises(InvalidArgumentError, match="a Split or None, got dict"):
        PipelineParallel(Outer(), {"layers": "model.layers"})
    with pytest.raises(InvalidArgumentError, match=r"wraps an nn\.Module, got list"):
        PipelineParallel([nn.Linear(2, 2)])


def test_one_process_keeps_everything():
    model = Outer()
    stage = PipelineParallel(model)
    assert stage.module is model
    assert (stage.stage, stage.num_stages, stage.tied_parameters) == (0, 1, {})
    assert not list(stage.placement.homes())
    assert [n for n, _ in stage.named_parameters()] == [n for n, _ in model.named_parameters()]
    assert not any(isinstance(module, PassThrough) for module in model.modules())


def test_a_single_name_is_a_tuple_of_one():
    assert Split(first="wte", last=["norm", "head"]) == Split(("wte",), last=("norm", "head"))


def test_pass_through():
    linear = nn.Linear(3, 5).eval()
    module = PassThrough(linear, "lm_head is on stage 2 of the pipeline")
    hidden = torch.ones(2)
    assert module(hidden, 1) is hidden
    assert module(x=hidden) is hidden
    assert module.out_features == 5
    assert not module.training
    text = "lm_head is on stage 2 of the pipeline, and its attribute 'weight' is not available"
    with pytest.raises(AttributeError, match=re.escape(text)):
        _ = module.weight
