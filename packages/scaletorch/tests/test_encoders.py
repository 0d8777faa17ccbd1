"""Models of torch's own encoder layers, and pointwise ones, on every layout of 4 ranks."""

import functools

import pytest
import torch
from sweeps import today
from test_any_batch import POSITIONS, Denoiser, noises, of_noise
from torch import nn
from training import in_one_process, sgd, tokens, train_and_compare

SIZE, WORDS = 16, 32


def encoder(**options):
    told = {"dropout": 0.0, "batch_first": True, "norm_first": True} | options
    layer = nn.TransformerEncoderLayer(SIZE, 4, 24, **told)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


class Tokens(nn.Module):
    """Words and positions, the layers, a head."""

    causal = False

    def __init__(self, between):
        super().__init__()
        self.words, self.positions = nn.Embedding(WORDS, SIZE), nn.Embedding(20, SIZE)
        self.between, self.head = between, nn.Linear(SIZE, WORDS)

    def forward(self, input_ids, position_ids=None):
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1])[None]
        x = self.words(input_ids) + self.positions(position_ids)
        return self.head(self.within(x))

    def within(self, x):
        return self.between(x)


class Causal(Tokens):
    def within(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        return self.between(x, mask=mask, is_causal=True)


class SequenceFirst(Tokens):
    def within(self, x):
        return self.between(x.transpose(0, 1)).transpose(0, 1)


class Bare(Tokens):
    """Its attention makes weights that nobody reads."""

    def __init__(self):
        super().__init__(nn.MultiheadAttention(SIZE, 4, batch_first=True))

    def within(self, x):
        return x + self.between(x, x, x)[0]


class ByTorch(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.inner = nn.MultiheadAttention(size, 4, batch_first=True)

    def forward(self, x):
        return self.inner(x, x, x, need_weights=False)[0]


def denoiser():
    model = Denoiser()
    for block in model.blocks:
        block.attention = ByTorch(32)
    return model


def mlp():
    return nn.Sequential(nn.Linear(SIZE, 24), nn.GELU(), nn.Linear(24, SIZE), nn.LayerNorm(SIZE))


MODELS = {
    "encoder": lambda: Tokens(encoder()),
    "causal": lambda: Causal(encoder(norm_first=False)),
    "sequence first": lambda: SequenceFirst(encoder(batch_first=False)),
    "bare": Bare,
    "denoiser": denoiser,
    "pointwise": lambda: Tokens(mlp()),
}
DENOISER = {
    "blocks.*.attention.inner": "attention",
    "blocks.*.mlp.0": "column",
    "blocks.*.mlp.2": "row",
}


def built(name):
    torch.manual_seed(0)
    model = MODELS[name]().double()
    for parameter in model.parameters():  # biases of attention are zeros in a new one
        nn.init.normal_(parameter, std=0.2)
    return model


def carefully(model):
    return torch.optim.SGD(model.parameters(), 1e-4)


def how_of(name):
    """Return batches, the optimizer (gradients of a denoiser are large), and the loss."""
    if name == "denoiser":
        return [noises(step) for step in range(2)], carefully, {"loss_fn": of_noise}
    return [tokens(step, 4, 16) for step in range(2)], sgd, {}


@functools.cache
def expected(name):
    batches, make, loss = how_of(name)
    return in_one_process(built(name), batches, make, **loss)


TP = ({"tp_size": 4}, {"tp_size": 2, "dp_size": 2}, {"tp_size": 2, "pp_size": 2})
CP = ({"cp_size": 4}, {"cp_size": 2, "dp_size": 2})
BOTH = {"cp_size": 2, "tp_size": 2}
SHARES, SPREAD = {"sequence_parallel": True}, {"cp_layout": "contiguous"}
CASES = [
    *(("encoder", sizes, options) for sizes, options in zip(TP, ({}, SHARES, SHARES), strict=True)),
    ("encoder", CP[0], SPREAD),
    ("encoder", BOTH, SPREAD | SHARES),
    ("encoder", CP[1], SPREAD | {"recompute": True}),
    ("causal", CP[0], {}),
    ("causal", BOTH, SHARES),
    ("sequence first", TP[1], {}),
    ("sequence first", CP[1], SPREAD),
    ("bare", BOTH, SPREAD | {"plan": {"between": "attention"}}),
    ("bare", CP[0], SPREAD),
    ("denoiser", TP[2], {"plan": DENOISER}),
    ("denoiser", CP[1], SPREAD),
    ("pointwise", CP[1], {}),
]
REHEARSED = "pointwise", "bare"  # the others would take twice as long


@pytest.mark.parametrize(("name", "sizes", "options"), today(CASES, 8), ids=str)
def test_layouts_train_as_one_process(name, sizes, options):
    batches, make, loss = how_of(name)
    train_and_compare(
        expected(name), functools.partial(built, name), sizes, batches, make,
        options=options, micro_batches=2, rehearse=name in REHEARSED,
        cut={"sequence_dims": POSITIONS if name == "denoiser" else None}, **loss,
    )  # fmt: skip
