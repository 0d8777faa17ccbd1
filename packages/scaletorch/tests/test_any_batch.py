"""Models that are none of tokens: any first argument, any entries, rows as dim 0."""

import dataclasses
import functools

import pytest
import torch
import torch.nn.functional as F
from sweeps import today
from torch import nn
from training import grid, in_one_process, train_and_compare

from scaletorch.compose import count_routing, parallelize, shard_global_batch, train_step
from scaletorch.dist.errors import InvalidArgumentError, ScaletorchError
from scaletorch.dist.testing import distributed_test
from scaletorch.parallel.tensor_parallel import Divide

ROWS = 7


class Attention(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.num_heads = 4
        self.q, self.k, self.v = (nn.Linear(size, size, bias=False) for _ in range(3))
        self.out = nn.Linear(size, size)

    def forward(self, x):
        q, k, v = (
            linear(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for linear in (self.q, self.k, self.v)
        )
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class DenoisingBlock(nn.Module):
    """Attention and an MLP whose norms are scaled by a condition, as in a diffusion transformer."""

    def __init__(self, size):
        super().__init__()
        self.norm = nn.LayerNorm(size, elementwise_affine=False)
        self.modulation = nn.Linear(size, 3 * size)
        self.attention = Attention(size)
        self.mlp = nn.Sequential(nn.Linear(size, 2 * size), nn.GELU(), nn.Linear(2 * size, size))

    def forward(self, x, condition):
        scale, shift, gate = self.modulation(condition)[:, None].chunk(3, -1)
        x = x + gate * self.attention(self.norm(x) * (1 + scale) + shift)
        return x + self.mlp(self.norm(x))


class Denoiser(nn.Module):
    def __init__(self, size=32):
        super().__init__()
        self.inputs, self.time = nn.Linear(4, size), nn.Linear(1, size)
        self.blocks = nn.ModuleList(DenoisingBlock(size) for _ in range(4))
        self.head = nn.Linear(size, 4)

    def forward(self, latents, time):
        x, condition = self.inputs(latents), self.time(time[:, None])
        for block in self.blocks:
            x = block(x, condition)
        return self.head(x)


class Spectral(nn.Module):
    """A layer of complex parameters."""

    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size, 5, dtype=torch.complex128) * 0.1)

    def forward(self, h):
        modes = torch.fft.rfft(h.transpose(1, 2))
        modes = torch.cat([modes[..., :5] * self.weight, modes[..., 5:]], -1)
        return h + F.gelu(torch.fft.irfft(modes, n=h.shape[1]).transpose(1, 2))


class Fourier(nn.Module):
    def __init__(self, size=16):
        super().__init__()
        self.inputs, self.head = nn.Linear(3, size), nn.Linear(size, 1)
        self.layers = nn.ModuleList(Spectral(size) for _ in range(4))

    def forward(self, x):
        h = self.inputs(x)
        for layer in self.layers:
            h = layer(h)
        return self.head(h)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv1d(3, 16, 3, padding=1)
        self.recurrent = nn.LSTM(16, 16, 2, batch_first=True)
        self.head = nn.Linear(16, 5)

    def forward(self, series):
        return self.head(self.recurrent(self.convolution(series).transpose(1, 2))[0][:, -1])


@dataclasses.dataclass
class Series:
    series: torch.Tensor
    labels: torch.Tensor


def drawn(step, *shape):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, *shape, generator=generator, dtype=torch.float64)


def noises(step):
    time = drawn(step + 20).sigmoid()
    return {"latents": drawn(step, 8, 4), "time": time, "loss_noise": drawn(step + 10, 8, 4)}


def curves(step):
    return {"x": drawn(step, 12, 3), "loss_y": drawn(step + 10, 12, 1)}


def series(step):
    labels = torch.randint(5, (ROWS,), generator=torch.Generator().manual_seed(step))
    return Series(drawn(step, 3, 7), labels)


def pairs(step):
    return (series(step).series, series(step).labels)


def of_noise(output, micro_batch):
    return ((output - micro_batch["loss_noise"]) ** 2).sum(), output.numel()


def of_curve(output, micro_batch):
    return ((output - micro_batch["loss_y"]) ** 2).sum(), output.numel()


def of_class(output, micro_batch):
    return F.cross_entropy(output, micro_batch["labels"], reduction="sum"), len(output)


PLAN = {
    "blocks.*.attention": Divide("num_heads"),
    **dict.fromkeys((f"blocks.*.attention.{name}" for name in "qkv"), "column"),
    "blocks.*.attention.out": "row",
    "blocks.*.mlp.0": "column",
    "blocks.*.mlp.2": "row",
}
POSITIONS = {"latents": 1, "loss_noise": 1}
SHARED = {"sequence_parallel": True}
DP = [{"dp_size": 4}]
PP = [{"dp_size": 2, "pp_size": 2}, {"pp_size": 4}]
REST = [
    {"tp_size": 2, "dp_size": 2},
    {"tp_size": 2, "pp_size": 2},
    {"cp_size": 4},
    {"cp_size": 2, "dp_size": 2},
    {"cp_size": 2, "pp_size": 2},
    {"cp_size": 2, "tp_size": 2, **SHARED},
    {"tp_size": 4, **SHARED},
]
MODELS = {  # batches, the loss, and the layouts that the model is for
    "denoiser": (Denoiser, noises, of_noise, DP + PP + REST),
    "fourier": (Fourier, curves, of_curve, DP + PP),
    "recurrent": (Recurrent, series, of_class, DP),
    "recurrent, tuples": (Recurrent, pairs, of_class, [{"dp_size": 2}]),
}
CASES = [(name, sizes) for name, model in MODELS.items() for sizes in model[-1]]


@functools.cache
def expected(name):
    make, batch, loss_fn, _ = MODELS[name]
    batches = [as_mapping(batch(step)) for step in range(2)]
    return in_one_process(built(make), batches, loss_fn=loss_fn)


def as_mapping(batch):
    if isinstance(batch, tuple):
        batch = Series(*batch)
    return batch if isinstance(batch, dict) else vars(batch)


def built(make):
    torch.manual_seed(0)
    return make().double()


@pytest.mark.parametrize(("name", "sizes"), today(CASES, 8), ids=str)
def test_any_model_trains_as_in_one_process(name, sizes):
    make, batch, loss_fn, _ = MODELS[name]
    options = {each: sizes[each] for each in SHARED if each in sizes}
    options |= {"plan": PLAN} if "tp_size" in sizes else {}
    cut = {"sequence_dims": POSITIONS} if name == "denoiser" and "cp_size" in sizes else {}
    train_and_compare(
        expected(name),
        functools.partial(built, make),
        {axis: size for axis, size in sizes.items() if axis not in SHARED},
        [batch(step) for step in range(2)],
        options=options, micro_batches=3, rehearse=True, loss_fn=loss_fn, cut=cut,
    )  # fmt: skip


REFUSED = [
    ({"cp_size": 2}, {}, None, r"cp divides .* it is not known where this batch of latents, time"),
    ({"cp_size": 2}, {}, {"latents": 1},
     r"loss_noise has shape \[7, 8, 4\].* 8 positions that cp .*{'loss_noise': 1} or .*: None}"),
    ({"cp_size": 2}, {}, {"x": 1}, "sequence_dims names x, and the batch has only latents"),
    ({"cp_size": 2}, {}, {"latents": 3}, r"'latents': 3} does not fit: latents has shape \[7, 8"),
    ({"cp_size": 2}, {}, {"latents": 1, "loss_noise": 2}, "dims of 8 of latents, 4 of loss_noise"),
]  # fmt: skip


def step_of_noises(sizes, options, dims):
    with grid(sizes) as manager:
        model = parallelize(Denoiser().double(), manager, **options)
        cut = shard_global_batch(noises(0), 1, model=model, sequence_dims=dims)
        train_step(model, cut, loss_fn=of_noise)


@distributed_test(2)
def test_what_divides_positions_is_refused():
    for *case, words in REFUSED:
        with pytest.raises(ScaletorchError, match=words):
            step_of_noises(*case)


def test_batches_that_do_not_fit_are_named(alone):
    model = parallelize(Denoiser(), alone)
    batch = {name: entry.float() for name, entry in noises(0).items()}

    def step(batch, **told):
        return train_step(model, shard_global_batch(batch, 1, alone), **told)

    with pytest.raises(InvalidArgumentError, match="takes latents first, and the batch has time"):
        step({"time": batch["time"]}, loss_fn=of_noise)
    with pytest.raises(InvalidArgumentError, match="has no labels"):
        step(batch)
    with pytest.raises(InvalidArgumentError, match="needs model="):
        shard_global_batch((batch["latents"], batch["time"]), 1, alone)
    for given, words in (
        ((batch["time"],) * 4, "of 4 entries does not fit a forward of latents"),
        (batch["latents"], "a dataclass or a tuple, got a Tensor"),
        ({"input_ids": batch["latents"]}, r"input_ids has the shape \[7, 8, 4\]"),
        ({"scale": 2.0}, r"dim 0 is rows.* this one has scale"),
    ):
        with pytest.raises(InvalidArgumentError, match=words):
            shard_global_batch(given, 1, model=model)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.attention = nn.Embedding(16, 8), Attention(8)
        self.head = nn.Linear(8, 16)

    def forward(self, input_ids):
        return self.head(self.attention(self.embed(input_ids)))


class Picked(nn.Module):
    def forward(self, hidden, index, weights):
        return hidden * weights.sum(-1, keepdim=True)


class Routed(Encoder):
    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(8, 4), Picked()

    def forward(self, input_ids):
        x = self.embed(input_ids).flatten(0, 1)
        weights, index = self.gate(x).softmax(-1).topk(2)
        return self.head(self.experts(x, index, weights)).unflatten(0, input_ids.shape)


def of_lengths(model, *lengths, **how):
    """Return micro-batches of sequences, each cut by itself; cp pads odd lengths."""
    ids = torch.arange(16).expand(2, 16)
    wholes = ({"input_ids": ids[:, :n], "labels": ids[:, :n]} for n in lengths)
    return [each for whole in wholes for each in shard_global_batch(whole, 1, model=model, **how)]


@distributed_test(4)
def test_full_attention_to_padding_is_refused_in_every_micro_batch():
    plan = {n.removeprefix("blocks.*."): s for n, s in PLAN.items() if "attention" in n}
    for sizes in ({"cp_size": 4}, {"cp_size": 2, "dp_size": 2}, {"cp_size": 2, "tp_size": 2}):
        with grid(sizes) as manager:
            options = {"plan": plan} if manager.tp_size > 1 else {}
            model = parallelize(Encoder(), manager, **options, rehearse=False)
            for lengths in ((15,), (16, 15), (15, 16)):
                train_step(model, of_lengths(model, 16))
                with pytest.raises(InvalidArgumentError, match="would see the padding"):
                    train_step(model, of_lengths(model, *lengths))
                model.reset()
            if manager.dp_size > 1:  # one dp rank alone has read shorter rows
                own = of_lengths(model, 16 - manager.dp_rank, own_rows=True)
                with pytest.raises(InvalidArgumentError, match="would see the padding"):
                    train_step(model, own)
    with grid({"cp_size": 4}) as manager:
        model = parallelize(Routed(), manager, rehearse=False)
        count_routing(model, "gate.bias")
        with pytest.raises(InvalidArgumentError, match="several lengths, and count_routing"):
            train_step(model, of_lengths(model, 16, 15))


@distributed_test(2)
def test_positions_of_tokens_that_are_named_or_known_are_divided():
    """Compare what a cp rank gets of an entry [B, L, V] beside tokens with what it should."""
    teacher, ids = drawn(0, 13, 5), torch.arange(13).expand(ROWS, 13)
    batch = {"input_ids": ids, "labels": ids, "loss_teacher": teacher, "loss_kept": ids}
    dims = {"loss_teacher": 1, "loss_kept": None, "labels": 1}
    embeds = {"inputs_embeds": drawn(0, 8, 4), "labels": torch.zeros(ROWS, 8, dtype=torch.long)}
    with grid({"cp_size": 2}) as manager:
        (cut,) = shard_global_batch(batch, 1, manager, sequence_dims=dims)
        (known,) = shard_global_batch(embeds, 1, manager)
    # Of embeddings and labels it is known which dim is positions.
    assert [tuple(entry.shape) for entry in known.values()] == [(ROWS, 4, 4), (ROWS, 4)]
    places = cut.cut.sequences.positions()
    padded = F.pad(teacher, (0, 0, 0, 16 - 13))[:, places]
    assert torch.equal(cut["labels"], torch.where(places < 13, places, -100).expand(ROWS, -1))
    assert torch.equal(cut["loss_kept"], ids)
    assert torch.equal(cut["loss_teacher"], padded)
