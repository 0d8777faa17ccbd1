"""A rehearsal agrees with one process where a layout is right, and else names the place.

`Everything` has what was once taken for a fault; each of `FAULTS` is planted on all its layouts,
a few of them each day.
"""

import copy
import io
import random
import re
import warnings
from contextlib import nullcontext, redirect_stderr
from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from mutants.patch import patched
from refusals import models
from refusals.layouts import LAYOUTS, SHARED, Layout
from refusals.rows import batch
from sweeps import today
from torch import nn
from torch.utils.checkpoint import checkpoint
from training import FOUR, in_one_process, tokens, train_and_compare

from scaletorch.compose import (
    full_state_dict,
    parallelize,
    rehearse,
    shard_global_batch,
    token_losses,
    train_step,
)
from scaletorch.dist import all_reduce, get_rank
from scaletorch.dist.errors import RehearsalError, StateError
from scaletorch.dist.testing import distributed_test, run_ranks
from scaletorch.parallel.data_parallel import shard_optimizer
from scaletorch.parallel.pg_manager import (
    destroy_process_group_manager,
    get_process_group_manager,
    setup_process_group_manager,
)


class Layer(models.Layer):
    """Norms of heads, a scale within the MLP, and dropout."""

    attention, feed_forward = models.NormedAttention, models.ScaledMLP

    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return super().forward(F.dropout(self.drop(x), 0.3, self.training))


class Everything(models.Plain):
    """Layers that are called several times, frozen parts, a gain behind the head."""

    layer = Layer

    def __init__(self, depth):
        super().__init__(depth)
        self.layers = nn.ModuleList([*self.layers, *self.layers])
        self.layers[0].mlp.up_proj.weight.requires_grad_(False)
        self.gain = nn.Parameter(torch.tensor(0.8))

    def top(self, x):
        return super().top(x) * self.gain


class FeatureMLP(models.MLP):
    def inner(self, x):
        x = super().inner(x)
        return x * x.softmax(-1)


class Features(models.Plain):
    """Each rank has the softmax of its own features."""

    layer = models.layer_of(feed_forward=FeatureMLP)


# Each rank, and each micro-batch, has the mean of its own rows.
Rows = models.mixing(lambda x: x - 0.1 * x.mean(0))


def halved(backward):
    def half(self, *args):
        gradient = backward(self, *args)
        return gradient if gradient is None else gradient / 2

    return half


BOUNDARY = "parallel.pipeline_parallel.stages.stage:PipelineParallel.backward"
SUMS = "compose.gradients:_sum"
# Of an axis: the model, a fault of the library, and what the message names.
FAULTS = {
    "tp": (Features, None, r"output of layers\.0 is off by .*tp div"),
    "sums": (
        models.Normed,
        (SUMS, lambda _: lambda *_: None),
        r"gradient of layers\.\d\.self_attn",
    ),
    "dp": (Rows, None, r"output of layers\.0 is off by .*divide rows"),
    "cp": (models.Conv, None, r"output of layers\.0 is off by .*ix (positions|them) by F\.scaled"),
    "sequence_parallel": (
        models.mixing(lambda x: x.cumsum(1), "before"),
        None,
        r"input of layers\.0 is off by .*'sequence_whole', or the layers 'sequence_layer'",
    ),
    "pp": (
        models.Plain,
        (BOUNDARY, halved),
        r"gradient of the output of layers\.\d+ is off by .*from stage to stage",
    ),
}


def prepared(kind, layout, dtype=torch.float64, whole=None, seed=0, **options):
    manager = setup_process_group_manager(**layout.sizes)
    torch.manual_seed(seed)
    net = kind(layout.depth).to(dtype)
    for layer in net.layers if layout.compiled else ():
        layer.compile(backend="eager")
    plan = {"plan": models.PLAN} if manager.tp_size > 1 else {}
    model = parallelize(net, manager, **{**plan, **layout.options, **options, "rehearse": True})
    if layout.zero:
        shard_optimizer(torch.optim.SGD(model.parameters(), 0.1), model, stage=layout.zero)
    return model, shard_global_batch(whole or batch(0), layout.micro_batches, model=model)


def told(kind, layout, dtype=torch.float64, fault=None, whole=None, seed=0, **own):
    """Return what a rehearsal raises on this rank."""
    torch._dynamo.reset() if layout.compiled else None
    try:
        with patched(*fault) if fault else nullcontext():
            model, micro_batches = prepared(kind, layout, dtype, whole, seed)
            rehearse(model, micro_batches, **own)
        return None
    except RehearsalError as error:
        return str(error)
    finally:
        destroy_process_group_manager()


def planted(axis, layout):
    kind, fault, _ = FAULTS[axis]
    return told(kind, layout, fault=fault)


def axes_of(layout):
    found = [axis for axis in ("tp", "cp", "pp", "sequence_parallel") if axis in layout.features]
    found += ["sums"] * ("tp" in found)
    return found + ["dp"] * bool(layout.features & {"dp", "several"})


@pytest.mark.timeout(600)
def test_right_layouts_agree():
    mistakes = []
    for layout in today(LAYOUTS, 20):
        found = run_ranks(told, layout.ranks, Everything, layout, timeout=200)
        mistakes += [f"{layout}: {said}" for said in {*found} - {None}]
    assert not mistakes, "\n".join(mistakes)


@pytest.mark.timeout(600)
def test_faults_are_named():
    mistakes, cases = [], [(axis, layout) for layout in LAYOUTS for axis in axes_of(layout)]
    for axis, layout in today(cases, 40):
        for said in run_ranks(planted, layout.ranks, axis, layout, timeout=200):
            if not re.search(FAULTS[axis][2], said or "", re.DOTALL):
                mistakes.append(f"{axis} on {layout}: {said}")
    assert not mistakes, "\n".join(mistakes)


class GatedLayer(models.Layer):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(models.HIDDEN, models.HIDDEN, 3, padding=1)
        self.gate = nn.Parameter(torch.zeros(models.HIDDEN))

    def forward(self, x):
        return super().forward(x) + self.gate * self.conv(x.mT).mT


class Hidden(models.Plain):
    """All that the convolutions do is behind gates and a head that begin as zero."""

    layer = GatedLayer

    def __init__(self, depth):
        super().__init__(depth)
        nn.init.zeros_(self.lm_head.weight)


@pytest.mark.timeout(300)
def test_nothing_hides_behind_zeros():
    layouts = [each for each in LAYOUTS if each.ranks == 4 and each.axes.get("cp", 1) > 1]
    for layout in today(layouts, len(layouts)):
        for said in run_ranks(told, 4, Hidden, layout, timeout=200):
            where = r"output of layers\.0 is off by \S+ of its size \(in positions .* of 16\)"
            assert re.search(where, said or ""), (layout, said)


def turned_in_blocks(size):
    mixing = models.mixing(lambda x: x + x.unflatten(1, (-1, size)).flip(2).flatten(1, 2))
    return told(mixing, Layout({"cp": 2}), whole=tokens(0, 4, 1040, models.VOCAB))


@pytest.mark.parametrize("size", [13, 20])
def test_few_positions_are_divided_as_many_are(size):
    """Each rank has two blocks of 260 positions, and in a rehearsal of 65."""
    assert run_ranks(turned_in_blocks, 2, size, timeout=200) == [None] * 2


class OfOneLength(models.Plain):
    """Has as many positions as the step, and takes no others."""

    def __init__(self, depth):
        super().__init__(depth)
        self.table = nn.Parameter(torch.randn(200, models.HIDDEN))

    def forward(self, input_ids):
        return self.top(self.embed_tokens(input_ids) + self.table)


def test_a_model_of_one_length_is_rehearsed_in_that():
    whole = tokens(0, 4, 200, models.VOCAB)
    said = run_ranks(told, 2, OfOneLength, Layout({"dp": 2}), whole=whole, timeout=200)
    assert said == [None] * 2


class ChoosingLayer(models.Layer):
    """Each position takes one of eight matrices, which rounding may decide."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(models.HIDDEN, 8)
        self.experts = nn.Parameter(torch.randn(8, models.HIDDEN, models.HIDDEN))

    def forward(self, x):
        x = x + self.self_attn(self.norm1(x))
        weight, chosen = self.router(self.norm2(x)).softmax(-1).topk(1)
        own = torch.einsum("blh,blhk->blk", x, self.experts[chosen[..., 0]])
        return x + self.mlp(x) + 3 * weight * own


class Choosing(models.Plain):
    layer = ChoosingLayer


def test_choices_that_rounding_decides_are_no_alarm():
    layout = Layout({"tp": 2}, SHARED)
    for seed in today(range(8), 4):
        given, how = (Choosing, layout, torch.bfloat16), {"whole": batch(seed), "seed": seed}
        assert run_ranks(told, 2, *given, **how, timeout=200) == [None] * 2, seed


class SlightlyOffMLP(models.MLP):
    """Is off by 0.1 % where features are divided, by less than bfloat16 rounds."""

    def forward(self, x):
        divided = self.up_proj.weight.shape[0] < models.INNER
        return super().forward(x) * (1.001 if divided else 1.0)


class SlightlyOff(models.Plain):
    layer = models.layer_of(feed_forward=SlightlyOffMLP)


SEQUENCES, CONTEXT, STAGES, SHARDS = (
    Layout({"tp": 2, "dp": 2}, SHARED),
    Layout({"tp": 2, "cp": 2}),
    Layout({"tp": 2, "pp": 2}, micro_batches=2),
    Layout({"tp": 2, "dp": 2}, zero=2),
)
IN_16_BITS = {  # dtype, options, autocast, and layouts of which each day tries one
    "bfloat16": (torch.bfloat16, {}, False, (SEQUENCES, STAGES)),
    "float16": (torch.float16, {}, False, (CONTEXT, SHARDS)),
    "autocast": (torch.float32, {}, True, (SEQUENCES, STAGES)),
    "sums in bfloat16": (
        torch.float32,
        {"data_parallel": {"reduce_dtype": torch.bfloat16}},
        False,
        (CONTEXT, SHARDS),
    ),
}


def rehearsed(kind, layout, dtype=torch.float64, options=None, casts=False):
    """Return what a rehearsal raises, or says on rank 0; check that values are as before."""
    said = io.StringIO()
    try:
        with redirect_stderr(said), torch.autocast("cpu", torch.bfloat16, enabled=casts):
            model, micro_batches = prepared(kind, layout, dtype, **(options or {}))
            before = [(p, p.data_ptr(), p.detach().clone()) for p in model.parameters()]
            rehearse(model, micro_batches)
            for p, place, values in before:
                assert (p.data_ptr(), p.dtype) == (place, dtype)
                assert torch.equal(p, values)
            train_step(model, micro_batches)
            assert all(p.grad is None or p.grad.dtype == dtype for p, *_ in before)
    except RehearsalError as error:
        return str(error)
    finally:
        destroy_process_group_manager()
    return said.getvalue()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("how", IN_16_BITS)
def test_16_bits_are_rehearsed_in_float32(how):
    *options, layouts = IN_16_BITS[how]
    for layout in today(layouts, 2):
        right = run_ranks(rehearsed, 4, Everything, layout, *options, timeout=200)
        line = r"rehearsal: \d+ units on \S+ agree with one process to \S+e-0[67] in float32, "
        assert re.match(line, right[0]), (layout, right[0])
        assert right[1:] == [""] * 3
        for said in run_ranks(rehearsed, 4, SlightlyOff, layout, *options, timeout=200):
            assert "output of layers.0 is off by" in said, (layout, said)


class Embeddings(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(models.VOCAB, models.HIDDEN)
        self.norm = nn.RMSNorm(models.HIDDEN)

    def forward(self, input_ids):
        return self.norm(self.tokens(input_ids))


class ScaledLayer(models.Layer):
    def forward(self, x, scale):
        return super().forward(x) * scale


class OfItsDtype(models.Plain):
    """Every stage makes what its layers take in the dtype of what the first stage embeds."""

    layer = ScaledLayer

    def __init__(self, depth):
        super().__init__(depth)
        self.embed_tokens = Embeddings()

    def forward(self, input_ids):
        x = self.embed_tokens(input_ids)
        scale = torch.linspace(0.3, 1, models.HIDDEN).to(x.dtype)
        for layer in self.layers:
            x = layer(x, scale)
        return self.lm_head(self.norm(x))


@pytest.mark.timeout(300)
def test_what_other_stages_have_is_in_float32_too():
    sizes = {"dp": 2, "pp": 2}
    for schedule in ("1f1b", "zb_v"):
        layout = Layout(sizes, {"schedule": schedule}, micro_batches=2)
        said = run_ranks(rehearsed, 4, OfItsDtype, layout, torch.bfloat16, timeout=200)[0]
        assert "agree with one process to" in said, schedule


def test_too_little_memory_for_float32_is_told():
    line = run_ranks(without_memory, 2, timeout=200)[0]
    assert "in bfloat16, " in line
    assert "not compared: anything in float32, for which a rank has too little memory" in line


def without_memory():
    with patched("compose.rehearsal.training:_free", lambda _: lambda device: 0):
        return rehearsed(models.Plain, Layout({"dp": 2}), torch.bfloat16)


class Picky(models.Plain):
    def top(self, x):
        if x.dtype != torch.bfloat16:
            raise TypeError("made for bfloat16")
        return super().top(x)


def test_what_runs_in_bfloat16_alone_is_rehearsed_in_that():
    line = run_ranks(rehearsed, 2, Picky, Layout({"tp": 2}), torch.bfloat16, timeout=200)[0]
    assert re.match(
        r"rehearsal: \d+ units on \S+ agree with one process to \S+ in bfloat16, ", line
    )
    assert re.search("not compared: anything in float32, which fails .*made for bfloat16", line)


@distributed_test(4, timeout=200)
def test_everything_is_as_it_was():
    """A rehearsal, also one in `no_sync`, leaves everything as it was."""
    model, micro_batches = prepared(models.FrozenNorm, Layout({"tp": 2, "dp": 2}))
    before = copy.deepcopy(full_state_dict(model)), torch.get_rng_state(), random.getstate()
    modes = [module.training for module in model.modules()]
    with model.no_sync():
        rehearse(model, micro_batches)
        assert not model.require_backward_grad_sync
    assert modes == [module.training for module in model.modules()]
    assert all(torch.equal(x, before[0][n]) for n, x in full_state_dict(model).items())
    assert torch.equal(torch.get_rng_state(), before[1])
    assert random.getstate() == before[2]
    assert all(p.grad is None for p in model.parameters())
    destroy_process_group_manager()


class Noisy(models.Layer):
    def forward(self, x):
        return super().forward(x + 0.1 * torch.randn_like(x))


class OneIsNoisy(models.Plain):
    def __init__(self, depth):
        super().__init__(depth)
        self.layers[0].__class__ = Noisy


class Reaches(models.Plain):
    """The root uses weights of its layers itself."""

    def top(self, x):
        return super().top(x + self.layers[0].norm1.weight)


@distributed_test(2, timeout=200)
def test_later_hooks_that_look_and_penalties_are_no_alarm():
    """A hook that looks changes nothing, one that came later and changes something is refused."""
    model, micro_batches = prepared(models.Plain, Layout({"dp": 2}))
    layer, seen = model.module.module.layers[0], []
    layer.register_forward_hook(lambda _m, _i, x: seen.append(x.shape))
    hook = layer.register_forward_hook(lambda _m, _i, x: x * 1.5)
    with pytest.raises(RehearsalError, match=r"layers\.0 .*without hooks that came later"):
        train_step(model, micro_batches)
    assert all(p.grad is None for p in model.parameters())
    hook.remove()

    def loss_fn(output, micro_batch):
        labels = micro_batch["labels"]
        count = int((labels != -100).sum())
        total = F.cross_entropy(output.flatten(0, 1), labels.flatten(), reduction="sum")
        return total + count * 0.1 * sum(p.square().sum() for p in model.parameters()), count

    rehearse(model, micro_batches, loss_fn=loss_fn)
    train_step(model, micro_batches, loss_fn=loss_fn)
    with pytest.raises(StateError, match="a rehearsal has gradients of its own"):
        rehearse(model, micro_batches, loss_fn=loss_fn)
    destroy_process_group_manager()
    manager = setup_process_group_manager(dp_size=2)
    model = parallelize(models.Plain(2), manager, rehearse=False)
    with pytest.raises(StateError, match="unless it is called with rehearse=False"):
        rehearse(model, shard_global_batch(batch(0), 1, model=model))


class Around(models.Layer):
    """Its call is a checkpoint around its own forward, as layers of transformers do."""

    reentrant = True

    def __call__(self, x):
        return checkpoint(super().__call__, x, use_reentrant=self.reentrant)


class Within(models.Plain):
    layer = Around

    def __init__(self, depth, reentrant):
        super().__init__(depth)
        for layer in self.layers:
            layer.reentrant = reentrant


class Counted(models.Layer):
    """Each call counts, also that which runs again in backward."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) / self.calls


class CountedInCheckpoints(models.Plain):
    layer = Counted

    def __init__(self, depth, reentrant):
        super().__init__(depth)
        self.reentrant = reentrant

    def top(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return self.lm_head(self.norm(x))


class Turned(models.Plain):
    """A complex weight, and an embedding whose gradient is sparse."""

    def __init__(self, depth):
        super().__init__(depth)
        self.embed_tokens.sparse = True
        self.turn = nn.Parameter(torch.ones(models.HIDDEN, dtype=torch.complex128))

    def to(self, dtype):  # of what is real
        for child in self.children():
            child.to(dtype)
        return self

    def top(self, x):
        return super().top((x * self.turn).real)


class Told(models.Layer):
    def forward(self, x):
        y = super().forward(x)
        self.size = y.square().mean()
        return y


class Beside(models.Plain):
    """Its root takes something of its layers that they did not return."""

    layer = Told

    def top(self, x):
        return super().top(x) * sum(layer.size for layer in self.layers)


def either(kind):
    return [partial(kind, reentrant=reentrant) for reentrant in (True, False)]


IN_CHECKPOINTS = [
    (Turned, Layout({"pp": 2}, micro_batches=2)),
    *product(either(Within), [Layout({a: 2}, micro_batches=2) for a in ("dp", "pp", "tp")]),
    *product(either(CountedInCheckpoints), [Layout({a: 2}) for a in ("dp", "tp", "cp", "pp")]),
]


def other_ways(cases):
    for kind, layout in cases:
        with warnings.catch_warnings(action="ignore"):  # that they count
            assert told(kind, layout) is None, (kind, layout)
    assert told(Beside, Layout({"tp": 2})) is None
    wrong = ("compose.rehearsal.replay:Replay._add_beside", lambda _: lambda *_: None)
    with patched("compose.rehearsal.rehearse:_ALL_AT_ONCE", lambda _: 0):  # as of a large model
        assert "is off by" in told(Beside, Layout({"tp": 2}), fault=wrong)


def test_checkpoints_and_what_is_taken_beside_a_result_are_no_alarm():
    run_ranks(other_ways, 2, today(IN_CHECKPOINTS, 5), timeout=200)


def masked():
    """Gradients of some rows of an embedding are left out by a hook of the plain model."""
    torch.manual_seed(0)
    plain = models.Plain(4).double()
    plain.embed_tokens.weight.register_hook(lambda grad: grad * 0.5)
    plain.layers[1].norm1.weight.register_hook(lambda grad: grad * 0.0)
    return plain


@pytest.mark.parametrize("layout", ["dp 4", "pp 4", "dp 2 x cp 2"])
def test_hooks_of_gradients_are_no_alarm(layout):
    expected, how = in_one_process(masked(), [batch(0)]), {"micro_batches": 2, "rehearse": True}
    train_and_compare(expected, masked, FOUR[layout], [batch(0)], **how)


class Energies(nn.Module):
    """Returns energies, and forces: their gradients, taken within its forward."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(3, 8), nn.Linear(8, 1)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, positions):
        with torch.enable_grad():
            positions = positions.detach().requires_grad_()
            x = torch.tanh(self.up(positions))
            for layer in self.layers:
                x = x + torch.tanh(layer(x))
            energies = self.down(x).sum((1, 2))
            (slopes,) = torch.autograd.grad(energies.sum(), positions, create_graph=True)
        return energies, -slopes


def of_energies(output, _batch):
    energies, forces = output
    return energies.square().sum() + forces.square().sum(), len(energies)


def energies():
    return Energies().double()


def test_gradients_within_a_forward_are_no_alarm():
    batches = [{"positions": models.drawn(0, (8, 5, 3))}]
    expected = in_one_process(energies(), batches, loss_fn=of_energies)
    how = {"micro_batches": 2, "rehearse": True, "loss_fn": of_energies}
    for sizes in ({}, FOUR["dp 4"]):
        train_and_compare(expected, energies, sizes, batches, **how)


class SharedKeys(models.Attention):
    """Every other layer attends to the keys and values that the one before left in a dict."""

    def forward(self, x):
        q, k, v = (self.heads(proj(x)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        if self.leaves:
            self.left["keys"] = k, v
        k, v = self.left["keys"]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class Sharing(models.Plain):
    layer = models.layer_of(SharedKeys)

    def __init__(self, depth):
        super().__init__(depth)
        left = {}
        for index, layer in enumerate(self.layers):
            layer.self_attn.left, layer.self_attn.leaves = left, index % 2 == 0


def sharing():
    torch.manual_seed(0)
    return Sharing(4).double()


@pytest.mark.parametrize("layout", [name for name in FOUR if name != "pp 4"])
def test_tensors_that_pass_by_the_results_of_layers_are_no_alarm(layout):
    plan = {"plan": models.PLAN} if "tp" in layout else {}
    how = {"micro_batches": 2, "rehearse": True, "options": plan}
    expected = in_one_process(sharing(), [batch(0)])
    train_and_compare(expected, sharing, FOUR[layout], [batch(0)], **how)


def with_an_entry_added(kind, name):
    """One rank alone has an entry of its own, as a teacher's outputs on the last stage."""
    kind = models.Plain if kind == "Plain" else OneScore
    model, micro_batches = prepared(kind, Layout({"pp": 2}))
    if get_rank() == 1:
        micro_batches[0][name] = torch.zeros(8, 16)
    with warnings.catch_warnings(record=True) as heard, redirect_stderr(io.StringIO()) as written:
        warnings.simplefilter("always")
        rehearse(model, micro_batches, loss_fn=lambda *_: None, count_fn=lambda _: 1)
    destroy_process_group_manager()
    return [*(str(each.message) for each in heard), *written.getvalue().splitlines(keepends=True)]


class OneScore(models.Plain):
    def __init__(self, depth):
        super().__init__(depth)
        self.lm_head = nn.Linear(models.HIDDEN, 1)


ADDED = [  # a model, the entry, and what the first rank says
    ("Plain", "teacher", "is not rehearsed: its micro-batches, or entries of them"),
    ("Plain", "loss_teacher", "; not compared: loss_fn, which reads loss_teacher\n"),
    ("OneScore", "loss_teacher", "not rehearsed: its loss_fn reads loss_teacher, added to micro-b"),
]


@pytest.mark.parametrize(("kind", "name", "words"), ADDED)
def test_entries_that_one_rank_has_added(kind, name, words):
    (said,), none = run_ranks(with_an_entry_added, 2, kind, name, timeout=200)
    assert words in said
    assert not none


def one_fails(where):
    """A plain model that fails on one rank alone keeps no other waiting."""

    def fails(run):
        def run_or_fail(self, *args):
            if self.ranks.manager.global_rank == 1:
                raise ValueError("on this rank alone")
            return run(self, *args)

        return run_or_fail

    with patched(where, fails):
        model, micro_batches = prepared(models.Plain, Layout({"dp": 2}))
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            rehearse(model, micro_batches)
    destroy_process_group_manager()
    return [str(each.message) for each in heard]


@pytest.mark.parametrize("where", ["Replay._answer", "Replay.weights", "Replay._add_beside"])
def test_a_rank_that_fails_keeps_none_waiting(where):
    said, none = run_ranks(one_fails, 2, f"compose.rehearsal.replay:{where}", timeout=200)
    if where == "Replay._answer":  # of which there is none where all of the model is its root
        assert said == none == []
    else:
        assert "could not be rehearsed: its plain module failed (" in said[0]


def given_out(layouts):
    """Return the units that this rank runs on each layout."""
    own = []

    def noted(run):
        def run_and_note(self, call, *args):
            own[-1].append(call.name)
            run(self, call, *args)

        return run_and_note

    with patched("compose.rehearsal.replay:Replay._run_given", noted):
        for layout in layouts:
            own.append([])
            assert told(models.Plain, layout) is None
    return own


def test_each_rank_runs_other_units():
    layouts = [Layout({axis: 2}) for axis in ("dp", "tp", "cp")]
    layouts.append(Layout({"pp": 2}, micro_batches=2))
    one, other = run_ranks(given_out, 2, layouts, timeout=200)
    assert (one, other) == ([["layers.0"]] * 4, [["layers.1"]] * 4)


def test_the_line_says_what_was_compared_and_what_was_not():
    for layout in today([Layout({"tp": 2}), Layout({"dp": 2})], 2):
        line, none = run_ranks(rehearsed, 2, models.Plain, layout, timeout=200)
        agree = r"rehearsal: 2 units on \S+ agree with one process to \S+e-1\d in float64,"
        assert re.match(agree, line)
        assert not none
        line, _ = run_ranks(rehearsed, 2, OneIsNoisy, layout, timeout=200)
        assert "not compared: layers.0, which gives another answer each time" in line
        line, _ = run_ranks(rehearsed, 2, Reaches, layout, timeout=200)
        assert "rehearsal: 0 units" in line


class NaNs(models.Plain):
    """Gives NaN in one process too."""

    def top(self, x):
        return super().top(x) * torch.nan


def without(_function):
    return lambda *_: None


def averaging(wrapper):
    return partial(wrapper, op="mean")


def losses_of(output, micro_batch):
    losses = token_losses(output, micro_batch)
    return losses.sum(), (micro_batch["labels"] != -100).sum()


def gathered_loss(output, micro_batch):
    """A loss that communicates, so that the plain model cannot compute it."""
    manager = get_process_group_manager()
    for group in (manager.cp_dp_group, manager.tp_group):
        all_reduce(torch.zeros(1), group=group)
    return losses_of(output, micro_batch)


def on_four(sizes):
    axes = {name.removesuffix("_size"): size for name, size in sizes.items()}
    return Layout(axes, micro_batches=2)


class FlatLayer(models.Layer):
    attention = models.NormedAttention

    def forward(self, x, rows):
        return super().forward(x.unflatten(0, (rows, -1))).flatten(0, 1)


class TurnedLayer(FlatLayer):
    def forward(self, x, rows):
        return super().forward(x.mT, rows).mT


class Flat(models.Plain):
    """Its layers take tokens [B * L, H]."""

    layer = FlatLayer

    def turned(self, x):
        return x

    def forward(self, input_ids):
        rows, x = len(input_ids), self.turned(self.embed_tokens(input_ids).flatten(0, 1))
        for layer in self.layers:
            x = layer(x, rows)
        return self.lm_head(self.norm(self.turned(x).unflatten(0, (rows, -1))))


class Turned(Flat):
    """Its layers take tokens [H, B * L], of which ranks' shards cannot be joined."""

    layer = TurnedLayer

    def turned(self, x):
        return x.mT


def line_of(*given, **own):
    with redirect_stderr(io.StringIO()) as said:
        assert told(*given, **own) is None
    return said.getvalue()


@pytest.mark.parametrize("layout", FOUR)
def test_gradients_of_layers_are_compared_if_the_loss_or_hidden_states_are_known(four, layout):
    faults = {"tp": (SUMS, without)} | dict.fromkeys(
        ("dp", "cp"), ("compose.parallelize:DataParallelBucket", averaging)
    )
    communicating = {"loss_fn": gathered_loss}
    for kind, own in ((models.Normed, communicating), (Flat, communicating), (Turned, {})):
        given = kind, on_four(FOUR[layout])
        for fault in (faults[axis] for axis in faults if axis in layout):
            for said in four.run(told, *given, fault=fault, **own):
                assert re.search(r"(gradient of layers\.\d|the loss).* is off by", said or "")
        line, *_ = four.run(line_of, *given, **communicating)
        left_out = kind is Turned and layout != "pp 4"  # where no group of the loss has two ranks
        assert ("gradients of layers.0, which follow from the loss" in line) == left_out


def times_nan(call):
    return lambda *args: call(*args) * torch.nan


@pytest.mark.parametrize("layout", FOUR)
def test_nan_on_the_layout_alone_is_refused(four, layout):
    """That of the loss, and of all gradients with it; what one process gives too is right."""
    for where in ("compose.step:_summed", "compose.loss:token_loss_sum"):
        fault = where, times_nan
        for said in four.run(told, models.Plain, on_four(FOUR[layout]), fault=fault):
            assert re.search("than in one process: .* is off by nan of its size", said or "")
    assert four.run(told, NaNs, on_four(FOUR[layout])) == [None] * 4
