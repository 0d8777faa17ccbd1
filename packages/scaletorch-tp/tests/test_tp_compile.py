"""Compiled by `torch.compile`, sharded layers give the numbers that they give as they are."""

import copy
import shutil

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from llamas import Mlp
from torch import nn

from scaletorch.dist.testing import run_ranks
from scaletorch.parallel.tensor_parallel import (
    Divide,
    apply_tensor_parallel,
    vocab_parallel_cross_entropy,
)

HIDDEN = 8
# dynamo looks whether tensors have a gradient
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = 4
        self.q, self.k, self.v, self.o = (nn.Linear(HIDDEN, HIDDEN) for _ in range(4))

    def forward(self, x):
        batch, length, _ = x.shape
        q = self.q(x).view(batch, length, -1, 2).transpose(1, 2)
        k = self.k(x).view(batch, length, self.heads, 2).transpose(1, 2)
        v = self.v(x).view(batch, length, self.heads, 2).transpose(1, 2)
        scores = F.dropout((q @ k.mT).softmax(-1), 0.5, self.training)
        return self.o((scores @ v).transpose(1, 2).reshape(batch, length, -1))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(20, HIDDEN)
        self.first, self.attention = nn.LayerNorm(HIDDEN), Attention()
        self.second, self.feedforward = nn.LayerNorm(HIDDEN), Mlp(HIDDEN, 16, True)
        self.head = nn.Linear(HIDDEN, 20)

    def forward(self, ids):
        x = self.tokens(ids)
        x = x + F.dropout(self.attention(self.first(x)), 0.25, self.training)
        return self.head(x + self.feedforward(self.second(x)))


class Loss(nn.Module):
    """The loss of logits that stay divided."""

    def __init__(self):
        super().__init__()
        self.model = Model()

    def forward(self, ids):
        return vocab_parallel_cross_entropy(
            self.model(ids), ids.roll(1), group=dist.group.WORLD, vocab_size=20
        )


FEEDFORWARD = {"gate_proj": "column", "up_proj": "column", "down_proj": "row"}
ATTENTION = {"": Divide("heads"), "q": "column", "k": "column", "v": "column", "o": "row"}
MODEL = {
    "tokens": "vocab",
    "head": "column_gather",
    **{f"feedforward.{name}": style for name, style in FEEDFORWARD.items()},
    **{f"attention.{name}".rstrip("."): style for name, style in ATTENTION.items()},
}
LAYERS = {
    "column": (lambda: nn.Linear(HIDDEN, 6), {"": "column"}),
    "column_gather": (lambda: nn.Linear(HIDDEN, 5), {"": "column_gather"}),
    "row": (lambda: nn.Linear(HIDDEN, 6), {"": "row_split"}),
    "feedforward": (lambda: Mlp(HIDDEN, 16, True), FEEDFORWARD),
    "model": (Model, MODEL),
    "loss": (Loss, {f"model.{name}": style for name, style in MODEL.items()}),
}


def sharded(kind, **options):
    make, plan = LAYERS[kind]
    torch.manual_seed(0)
    module = apply_tensor_parallel(make().double(), plan, dist.group.WORLD, **options)
    if kind == "loss":
        module.model.head.gather_output = False
    return module


def inputs(kind, length):
    generator = torch.Generator().manual_seed(length)
    if kind in ("model", "loss"):
        return torch.randint(20, (2, length), generator=generator)
    return torch.randn(2, length, HIDDEN, dtype=torch.float64, generator=generator)


def counting(backend):
    """Return the backend, and a list to which every run of a graph adds its operations."""
    inner, runs = torch._dynamo.lookup_backend(backend), []

    def compile_graph(graph, examples):
        size = sum(node.op.startswith("call") for node in graph.graph.nodes)
        compiled = inner(graph, examples)

        def run(*args):
            runs.append(size)
            return compiled(*args)

        return run

    return compile_graph, runs


def step(module, x):
    """Return what one forward and backward, with its draws, leaves behind."""
    x = x.clone().requires_grad_(x.is_floating_point())
    torch.manual_seed(3)
    out = module(x)
    out.square().mean().backward()
    return out, torch.rand(2), x.grad, *(p.grad for p in module.parameters())


def compare(kind, backend, training=True, sequence_parallel=False, lengths=(6,)):
    torch._dynamo.reset()
    module = sharded(kind, sequence_parallel=sequence_parallel).train(training)
    twin = copy.deepcopy(module)
    count, runs = counting(backend)
    compiled = torch.compile(twin, backend=count)
    for length in lengths:
        x = inputs(kind, length)
        runs.clear()
        for own, other in zip(step(module, x), step(compiled, x), strict=True):
            torch.testing.assert_close(own, other, rtol=1e-12, atol=1e-12)
    return runs


def layers_alone():
    """What is in the whole model as it is here is compiled there."""
    runs = [compare(kind, "aot_eager") for kind in ("column", "column_gather", "row")]
    return [*runs, compare("feedforward", "aot_eager", True, True, (6, 9))]  # another length, too


def test_layers_and_regions():
    for runs in run_ranks(layers_alone, 2, timeout=200)[0]:
        assert runs  # something was compiled


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a compiler")
def test_inductor():
    runs, _ = run_ranks(compare, 2, "feedforward", "inductor", timeout=200)
    assert sum(runs) >= 5  # three products, silu and the product of both


def test_a_whole_model_on_shares_whose_logits_stay_divided():
    runs, _ = run_ranks(compare, 2, "loss", "aot_eager", sequence_parallel=True, timeout=200)
    assert sum(runs) > 30
