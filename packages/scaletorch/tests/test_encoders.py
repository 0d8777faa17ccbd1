"""Models of torch's own encoder layers, and pointwise ones, on every layout of 4 ranks."""

import functools

import pytest
import torch
from test_any_batch import POSITIONS, Denoiser, noises, of_noise
from torch import nn

from scaletorch.compose import (
    eval_step,
    full_gradients,
    full_state_dict,
    parallelize,
    shard_global_batch,
    train_step,
)
from scaletorch.dist import RankFailedError
from scaletorch.dist.testing import relative_error, run_ranks
from scaletorch.parallel.pg_manager import (
    destroy_process_group_manager,
    setup_process_group_manager,
)

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


class ByHand(nn.Module):
    """Attention that calls none of torch's."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(SIZE, SIZE) for _ in range(3))

    def forward(self, x):
        return x + (self.q(x) @ self.k(x).mT).softmax(-1) @ self.v(x)


class Layers(Tokens):
    def within(self, x):
        for layer in self.between:
            x = layer(x)
        return x


class Sums(nn.Module):
    def forward(self, x):
        return x.cumsum(1)


class Slides(nn.Conv1d):
    def forward(self, x):
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


def mlp():
    return nn.Sequential(nn.Linear(SIZE, 24), nn.GELU(), nn.Linear(24, SIZE), nn.LayerNorm(SIZE))


MODELS = {
    "encoder": lambda: Tokens(encoder()),
    "causal": lambda: Causal(encoder(norm_first=False)),
    "sequence first": lambda: SequenceFirst(encoder(batch_first=False)),
    "bare": Bare,
    "patches": Patches,
    "denoiser": denoiser,
    "by hand": lambda: Layers(nn.ModuleList(ByHand() for _ in range(2))),
    "pointwise": lambda: Tokens(mlp()),
    "sums": lambda: Tokens(nn.Sequential(mlp(), Sums())),
    "slides": lambda: Tokens(nn.Sequential(mlp(), Slides(SIZE, SIZE, 3, padding=1))),
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
    drawn = torch.randint(WORDS, (ROWS, 17), generator=generator)
    return {"input_ids": drawn[:, :-1], "labels": drawn[:, 1:].clone()}


def of_class(output, micro_batch):
    loss = nn.functional.cross_entropy(output, micro_batch["labels"], reduction="sum")
    return loss, len(output)


LOSSES = {
    "denoiser": {"loss_fn": of_noise},
    "patches": {"loss_fn": of_class},
}


def trained(name, sizes, micro_batches=1, **options):
    """Losses and evaluations of three steps, the first gradients, and the weights."""
    manager = setup_process_group_manager(**sizes)
    try:
        torch.manual_seed(0)
        model = MODELS[name]().double()
        for parameter in model.parameters():  # biases of attention are zeros in a new one
            nn.init.normal_(parameter, std=0.2)
        model = parallelize(model, manager, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4 if name == "denoiser" else 0.1)
        losses, found, told = [], {}, LOSSES.get(name, {})
        for step in range(3):
            dims = POSITIONS if name == "denoiser" else None
            whole = batch_of(name, step)
            cut = shard_global_batch(whole, micro_batches, model=model, sequence_dims=dims)
            losses.append(train_step(model, cut, **told).double())
            found = found or {n: g.clone() for n, g in full_gradients(model).items()}
            optimizer.step()
            optimizer.zero_grad()
            losses.append(eval_step(model, cut, loss_fn=told.get("loss_fn")))
        weights = {f"weight {n}": w for n, w in full_state_dict(model).items()}
        return {"loss": torch.stack(losses)} | found | weights
    finally:
        destroy_process_group_manager()


@functools.cache
def in_one_process(name):
    return run_ranks(trained, 1, name, {})[0]


TP = ({"tp_size": 4}, {"tp_size": 2, "dp_size": 2}, {"tp_size": 2, "pp_size": 2})
CP = ({"cp_size": 4}, {"cp_size": 2, "dp_size": 2})
BOTH = {"cp_size": 2, "tp_size": 2}
SHARES, SPREAD = {"sequence_parallel": True}, {"cp_layout": "contiguous"}
CASES = [
    *(("encoder", sizes, options) for sizes in TP for options in ({}, SHARES)),
    *(("encoder", sizes, SPREAD) for sizes in (CP[0], BOTH)),
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
    *(("pointwise", sizes, {}) for sizes in CP),
]
REHEARSED = "pointwise", "bare"  # the others would take twice as long


@pytest.mark.parametrize(("name", "sizes", "options"), CASES, ids=str)
def test_layouts_train_as_one_process(name, sizes, options):
    expected = in_one_process(name)
    options = options | {"rehearse": name in REHEARSED}
    for found in run_ranks(trained, 4, name, sizes, 2, **options):
        assert found.keys() == expected.keys()
        for each, tensor in expected.items():
            assert relative_error(found[each], tensor) < 1e-11, each


@pytest.mark.parametrize("name", ["sums", "slides"])
@pytest.mark.parametrize("sizes", CP, ids=str)
def test_what_mixes_positions_is_refused_in_the_first_step(name, sizes):
    with pytest.raises(RankFailedError, match=r"computes something else|computes a position from"):
        run_ranks(trained, 4, name, sizes)


@pytest.mark.parametrize(
    ("sizes", "rehearses"),
    [(BOTH | {"tp_size": 1, "pp_size": 2}, False), (CP[0], False), (CP[1], True)],
    ids=str,
)
def test_attention_by_hand_is_refused_with_and_without_a_rehearsal(sizes, rehearses):
    words = r"called no F.scaled_dot|computes a position from|computes something else"
    with pytest.raises(RankFailedError, match=words):
        run_ranks(trained, 4, "by hand", sizes, 2, rehearse=rehearses)
