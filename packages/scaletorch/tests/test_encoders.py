"""Models of torch's own encoder layers, and pointwise ones, on every layout of 4 ranks."""

import functools

import pytest
import torch
from sweeps import today
from test_any_batch import POSITIONS, Denoiser, noises, of_noise
from torch import nn
from training import cross_entropy, in_one_process, sgd, tokens, train_and_compare

SIZE, WORDS, ROWS = 16, 32, 4


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


class Patches(nn.Module):
    """A vision transformer: patches, a token for the class, learned positions."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, SIZE, 4, 4)
        self.token = nn.Parameter(torch.randn(1, 1, SIZE))
        self.positions = nn.Parameter(torch.randn(1, 5, SIZE))
        self.encoder, self.head = encoder(activation="gelu"), nn.Linear(SIZE, 7)

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        return self.head(self.encoder(x)[:, 0])


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
    "patches": Patches,
    "denoiser": denoiser,
    "pointwise": lambda: Tokens(mlp()),
}
DENOISER = {
    "blocks.*.attention.inner": "attention",
    "blocks.*.mlp.0": "column",
    "blocks.*.mlp.2": "row",
}


def batch_of(name, step):
    if name == "denoiser":
        return noises(step)
    generator = torch.Generator().manual_seed(step)
    if name == "patches":
        images = torch.randn(ROWS, 3, 8, 8, generator=generator, dtype=torch.float64)
        return {"images": images, "labels": torch.randint(7, (ROWS,), generator=generator)}
    return tokens(step, ROWS, 16)


def of_class(output, micro_batch):
    loss = nn.functional.cross_entropy(output, micro_batch["labels"], reduction="sum")
    return loss, len(output)


LOSSES = {"denoiser": of_noise, "patches": of_class}


def built(name):
    torch.manual_seed(0)
    model = MODELS[name]().double()
    for parameter in model.parameters():  # biases of attention are zeros in a new one
        nn.init.normal_(parameter, std=0.2)
    return model


def carefully(model):
    return torch.optim.SGD(model.parameters(), 1e-4)


OPTIMIZERS = {"denoiser": carefully}  # its gradients are large


@functools.cache
def expected(name):
    batches, make = [batch_of(name, step) for step in range(2)], OPTIMIZERS.get(name, sgd)
    return in_one_process(built(name), batches, make, loss_fn=LOSSES.get(name, cross_entropy))


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
    ("patches", TP[1], {}),
    ("denoiser", TP[2], {"plan": DENOISER}),
    ("denoiser", CP[1], SPREAD),
    ("pointwise", CP[1], {}),
]
REHEARSED = "pointwise", "bare"  # the others would take twice as long


@pytest.mark.parametrize(("name", "sizes", "options"), today(CASES, 8), ids=str)
def test_layouts_train_as_one_process(name, sizes, options):
    train_and_compare(
        expected(name),
        functools.partial(built, name),
        sizes,
        [batch_of(name, step) for step in range(2)],
        OPTIMIZERS.get(name, sgd),
        options=options, micro_batches=2, rehearse=name in REHEARSED,
        cut={"sequence_dims": POSITIONS if name == "denoiser" else None},
        **({"loss_fn": LOSSES[name]} if name in LOSSES else {}),
    )  # fmt: skip
