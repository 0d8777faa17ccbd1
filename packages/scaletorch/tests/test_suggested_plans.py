"""Models of which no plan is known train by the one that a forward suggests, or are refused."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from training import in_one_process, on_a_layout, tokens, train_and_compare

from scaletorch.dist.errors import ScaletorchError
from scaletorch.dist.testing import run_ranks
from scaletorch.parallel.tensor_parallel import explain
from scaletorch.parallel.tensor_parallel.plans import trial

SHARED = {"sequence_parallel": True}
PAIRS = [{"tp_size": 2, f"{axis}_size": 2} for axis in ("dp", "pp")]
LAYOUTS = [
    ({"tp_size": 2, "cp_size": 2}, {}),
    *((sizes, options) for sizes in ({"tp_size": 4}, *PAIRS) for options in ({}, SHARED)),
]


class Block(nn.Module):
    """Attention and a perceptron side by side, in names of its own."""

    def __init__(self, heads=4, width=16):
        super().__init__()
        self.n, self.norm = heads, nn.LayerNorm(width)
        self.into, self.back = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 2 * 24), nn.Linear(24, width, bias=False)

    def forward(self, x):
        y = self.norm(x)
        q, k, v = (z.unflatten(-1, (self.n, -1)).transpose(1, 2) for z in self.into(y).chunk(3, -1))
        z = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        gate, up = self.wide(y).chunk(2, -1)
        return x + self.back(z.transpose(1, 2).flatten(2)) + self.narrow(self.between(gate, up))

    def between(self, gate, up):
        return F.gelu(gate) * up


class Counting(Block):
    """One whose perceptron asks how many features there are."""

    def between(self, gate, up):
        return F.gelu(gate) * up / gate.shape[-1]


class Language(nn.Module):
    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(kind() for _ in range(2))
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.words.weight

    def forward(self, input_ids):
        x = self.words(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def language(kind):
    return Language(kind).double()


def refused(sizes, options):
    """Return the error of a wrong suggestion, which no trial has found."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trial, "_computes_the_same", lambda *_: True)
        try:
            build = partial(language, Counting)
            on_a_layout(build, sizes, [tokens()], options=options, rehearse=True)
        except ScaletorchError as error:
            return type(error).__name__


@pytest.mark.parametrize(("sizes", "options"), LAYOUTS, ids=str)
def test_a_model_that_nobody_knows_trains_as_alone(sizes, options):
    batches = [tokens(step) for step in range(3)]
    for kind in (Block, Counting):
        expected = in_one_process(language(kind), batches)
        how = {"options": options, "rehearse": True}
        train_and_compare(expected, partial(language, kind), sizes, batches, **how)


@pytest.mark.parametrize(("sizes", "options"), LAYOUTS, ids=str)
def test_a_wrong_suggestion_is_refused(sizes, options):
    assert run_ranks(refused, 4, sizes, options) == ["RehearsalError"] * 4


@pytest.mark.parametrize("family", ["T5", "MT5", "UMT5"])
def test_attention_and_words_of_t5_are_divided(family):
    import transformers

    sizes = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_heads": 4}
    with torch.device("meta"):
        config = getattr(transformers, f"{family}Config")(
            **sizes, num_layers=1, feed_forward_proj="gated-gelu", tie_word_embeddings=False
        )
        model = getattr(transformers, f"{family}ForConditionalGeneration")(config)
    found = {p.name: p.style for p in explain(model, 2).parameters}
    where = "decoder.block.0.layer"
    assert found["shared.weight"] == "vocab"
    assert found["lm_head.weight"] == "column_gather"
    for attention in (f"{where}.0.SelfAttention", f"{where}.1.EncDecAttention"):
        assert {found[f"{attention}.{name}.weight"] for name in "qkv"} == {"column"}
        assert found[f"{attention}.o.weight"] == "row"
    bias = f"{where}.0.SelfAttention.relative_attention_bias.weight"
    assert found[bias] == "column_embedding"
    assert found[f"{where}.2.DenseReluDense.wi_0.weight"] == "column"
    assert found[f"{where}.2.DenseReluDense.wo.weight"] == "row"
