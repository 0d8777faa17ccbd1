"""What a loss reads beside the output: parameters, words of other ranks, shares of tokens."""

import re
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from small_models import Stack
from sweeps import today
from torch import nn
from training import grid, ranks_of

from scaletorch.compose import (
    full_gradients,
    parallelize,
    shard_global_batch,
    token_losses,
    train_step,
)
from scaletorch.dist import RankPool
from scaletorch.dist.testing import relative_error
from scaletorch.parallel.data_parallel import shard_optimizer

WORDS, WIDTH = 32, 8
SHARED, SHARDS = {"sequence_parallel": True}, {"loss_parallel": True}
PLAN = {"layers.*.up": "column", "layers.*.down": "row", "head": "column_gather"}


class Layer(nn.Module):
    attends = True

    def __init__(self):
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x))[:, None].chunk(3, -1)
        if self.attends:
            x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0]
        return x + self.down(torch.tanh(self.up(x)))


class Net(Stack):
    def __init__(self):
        super().__init__((Layer() for _ in range(4)), WIDTH, WORDS)


class Tied(Net):
    """Computes logits by the embedding's weight, without a layer."""

    def forward(self, input_ids):
        return F.linear(self.hidden(input_ids), self.embed.weight)


class Aux(Net):
    """Returns a value of each token, of the first layer's output, beside the logits."""

    def run(self, layer, x):
        x = layer(x)
        if layer is self.layers[0]:
            self.value = x.square().mean(-1)
        return x

    def forward(self, input_ids):
        return super().forward(input_ids), self.value


def net(kind=Net, attends=True):
    torch.manual_seed(0)
    model = kind().double()
    for layer in model.layers:
        layer.attends = attends  # sequences that tp divides would want a plan for it
    return model


def batch():
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(WORDS, (8, 9), generator=generator)
    tokens[:, -1] = WORDS - 1  # a word of the last rank, in every row
    return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:].contiguous()}


def plain_loss(output, mb):
    labels = mb["labels"]
    return F.cross_entropy(output.flatten(0, 1), labels.flatten(), reduction="sum"), labels.numel()


def picked(output, mb):
    labels = mb["labels"]
    return -output.log_softmax(-1).gather(-1, labels[..., None]).sum(), labels.numel()


def penalty(parameters):
    def loss_fn(output, mb):
        loss, count = plain_loss(output, mb)
        return loss + 0.1 * count * sum(p.square().sum() for p in parameters), count

    return loss_fn


def over_parameters(model, _):
    return penalty(list(model.parameters()))


def step(
    sizes, options, make=None, kind=Net, plan=PLAN, *, zero=0, dtype=torch.float64, rehearse=False
):
    """Return the loss of a step and whole gradients; `make` gives the loss, of both models."""
    with grid(sizes) as manager:
        plain = net(kind, "sequence_parallel" not in options).to(dtype)
        plain.before = list(plain.parameters())
        tp = {"plan": plan} if manager.tp_size > 1 else {}
        model = parallelize(plain, manager, **tp, **options, rehearse=rehearse)
        if zero:
            shard_optimizer(torch.optim.SGD(model.parameters(), 0.1), model, stage=zero)
        own = {} if make is None else {"loss_fn": make(model, plain)}
        loss = train_step(model, shard_global_batch(batch(), 4, model=model), **own)
        return loss.item(), full_gradients(model) if zero < 2 else {}


def attempt(*given, **options):
    """Return what was said of a step."""
    try:
        step(*given, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def require(found, model, loss_fn, where):
    """Compare a rank's loss and gradients with a plain model's."""
    model.zero_grad()
    total, count = loss_fn(model(batch()["input_ids"]), batch())
    (total / count).backward()
    loss, gradients = found
    assert loss == pytest.approx(total.item() / count, rel=1e-12), where
    grads = {n: p.grad for n, p in model.named_parameters() if n in gradients}
    errors = [relative_error(gradients[n], g) for n, g in grads.items() if g is not None]
    assert max(errors, default=0.0) < 1e-11, where


RIGHT = [  # sizes, options, ZeRO
    ({"dp_size": 2}, {}, 0),
    ({"dp_size": 2}, {"recompute": True}, 1),
    ({"dp_size": 2}, {}, 2),
    ({"cp_size": 2}, {}, 0),
]


@pytest.fixture(scope="module")
def pools():
    with RankPool(2, timeout=200) as two, RankPool(4, timeout=200) as four:
        yield {2: two, 4: four}


def test_a_penalty_is_right_where_ranks_have_whole_parameters(pools):
    model = net()
    for sizes, options, zero in today(RIGHT, 2):
        for found in pools[2].run(step, sizes, options, over_parameters, zero=zero):
            require(found, model, over_parameters(model, model), (sizes, options, zero))


def by_norms(model, _):
    """In one number for each parameter, without a sum over a list of all."""

    def loss_fn(output, mb):
        loss, count = plain_loss(output, mb)
        norms = torch.stack([p.norm(1) for p in model.parameters()])
        flat = torch.nn.utils.parameters_to_vector(model.parameters())
        return loss * (1 + norms.sum()) + count * flat.abs().sum(), count

    return loss_fn


def over_what_was_kept(_, plain):
    """Of those of the first layer, as they were before the model was cut."""
    return penalty(plain.before[:2])


def over_one_layer(model, _):
    """Of the parameters that the last stage has whole."""
    return penalty([p for n, p in model.named_parameters() if n.endswith("head.weight")])


CUT = [
    ({"tp_size": 2}, {"sequence_parallel": True}),
    ({"tp_size": 2}, {"recompute": True}),
    ({"pp_size": 2}, {"schedule": "zb_h1"}),
    ({"pp_size": 2}, {"schedule": "zb_v"}),
    ({"pp_size": 2}, {"schedule": "dualpipe_v"}),
    ({"tp_size": 2, "dp_size": 2}, {"sequence_parallel": True}),
    ({"tp_size": 2, "cp_size": 2}, {}),
    ({"tp_size": 2, "pp_size": 2}, {}),
    ({"pp_size": 2, "cp_size": 2}, {}),
]
READS = (
    "rank . .dp. pp. cp. tp..: loss_fn reads parameters of the model for a penalty .*weight_decay"
)


def test_a_penalty_is_refused_where_parameters_are_cut(pools):
    # Each way to read them on some layouts: over tp, over stages, and over both.
    others = [over_one_layer, over_what_was_kept, by_norms]
    cases = [(over_parameters, *layout) for layout in CUT]
    cases += [(make, *layout) for make in others for layout in (CUT[0], CUT[3])]
    for make, sizes, options in cases:
        for said in pools[ranks_of(sizes)].run(attempt, sizes, options, make):
            assert re.search(READS, said), (make, sizes, options, said)


def only_looks(model, _):
    """Reads norms without a gradient, and a reference model that is its own on every rank."""

    def loss_fn(output, mb):
        for p in model.parameters():
            p.detach().norm().item()
        loss, count = plain_loss(output, mb)
        return loss + count * sum(p.square().sum() for p in net().parameters()), count

    return loss_fn


def test_what_does_not_train_by_parameters_is_not_refused(pools):
    for sizes, options in today(CUT, len(CUT)):
        said = pools[ranks_of(sizes)].run(attempt, sizes, options, only_looks)
        assert {*said} == {""}, (sizes, options, said)


def plainly(*_):
    return plain_loss


def by_gather(*_):
    return picked


class Headless(Net):
    """Leaves its head and a temperature to the loss."""

    def __init__(self):
        super().__init__()
        self.warmth = nn.Parameter(torch.tensor(0.5))

    def forward(self, input_ids):
        return self.hidden(input_ids)


def headless(_, plain):
    def loss_fn(output, batch):
        return plain_loss(F.linear(output, plain.head.weight) * plain.warmth, batch)

    return loss_fn


def test_a_head_in_the_loss_is_right(pools):
    model, plan = net(Headless), {n: s for n, s in PLAN.items() if n != "head"}
    for sizes, options in today(CUT, len(CUT)):
        own = {k: v for k, v in options.items() if k != "sequence_parallel"}
        how = {"rehearse": "pp_size" not in sizes}  # there only the last stage has the head
        for found in pools[ranks_of(sizes)].run(step, sizes, own, headless, Headless, plan, **how):
            require(found, model, headless(model, model), (sizes, own))


TIED = "(word 31 of|in a parallel region and outside).* F.linear.x, emb"
PICKS = [  # options, the loss, the model, its plan, and what is said
    ({"loss_parallel": True}, plainly, Net, PLAN, "16 words on this rank.*loss_parallel=True"),
    ({"loss_parallel": True}, by_gather, Net, PLAN, "16 words on this rank.*take token_losses"),
    ({}, None, Net, {**PLAN, "head": "column"}, "word 31 of logits .* name it 'column_gather'"),
    ({}, plainly, Net, {**PLAN, "head": "column"}, "word 31 of logits .* name it 'column_gather'"),
    ({}, None, Tied, {**PLAN, "embed": "vocab"}, TIED),
]  # fmt: skip


def test_words_of_another_rank_are_refused_on_every_rank(pools):
    layouts = ({"tp_size": 2, "dp_size": 2}, {"tp_size": 2, "pp_size": 2})
    for (options, make, kind, plan, words), sizes in product(PICKS, layouts):
        if kind is Tied and "pp_size" in sizes:  # pp finds it first
            words = "forward returns a tensor of shape"
        for said in pools[4].run(attempt, sizes, options, make, kind, plan):
            assert re.search(words, said, re.DOTALL), (sizes, said)
            kinds = ("InvalidArgumentError", "MismatchError", "StageError")
            assert said.startswith(kinds), said


def with_aux(*_):
    def loss_fn(output, mb):
        loss, count = plain_loss(output[0], mb)
        return loss + 1e-7 * output[1].sum(), count

    return loss_fn


def test_a_value_of_each_token_is_a_share_under_sequence_parallelism(pools):
    for sizes in ({"tp_size": 2}, {"tp_size": 2, "dp_size": 2}):
        for options, words in ({}, "^$"), ({"sequence_parallel": True}, "shard of the tokens"):
            for said in pools[ranks_of(sizes)].run(attempt, sizes, options, with_aux, Aux):
                assert re.search(words, said), (sizes, options, said)


def with_tokens(*_):
    def loss_fn(output, mb):
        return token_losses(output, mb, z_loss=1e-3).sum(), mb["labels"].numel()

    return loss_fn


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rounding_is_no_difference(dtype, pools):
    makes = (({}, with_tokens), (SHARDS, with_tokens), (SHARDS, None), (SHARED, with_tokens))
    for options, make in makes:
        pools[4].run(step, {"tp_size": 4}, options, make, dtype=dtype)
