"""What descriptions and plans say of a model is what its real ranks keep and hold."""

import resource
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from planned import Case, differences, gathering, higher, kept_bytes, peaks
from sweeps import today
from torch import nn
from training import grid

from scaletorch.compose import parallelize, shard_global_batch, train_step
from scaletorch.dist.testing import preload, run_ranks
from scaletorch.models import Llama, LlamaConfig, Mixture, MixtureConfig
from scaletorch.parallel.pg_manager import Grid
from scaletorch.plan import Cut, Layout, cluster_named, describe, time
from scaletorch.plan.memory import memory

LENGTH, ROWS = 16, 4
SIZES = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
OURS = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_layers": 3, "num_heads": 4,
    "num_kv_heads": 2,
}  # fmt: skip


def build(family):
    """Return a tiny model; transformers is imported by those that need it alone."""
    if family == "Llama":
        return Llama(LlamaConfig(**OURS))
    if family == "Mixture":
        return Mixture(MixtureConfig(**OURS, num_experts=4))
    import transformers

    made = {
        "gemma2": lambda: transformers.Gemma2Config(**SIZES, head_dim=8, sliding_window=8),
        "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=8),
        "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
            **SIZES, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
        ),
        "gpt2": lambda: transformers.GPT2Config(
            vocab_size=96, n_embd=32, n_layer=3, n_head=4, n_positions=64, attn_pdrop=0.0,
            bos_token_id=0, eos_token_id=0,
        ),
    }  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(made[family]())


def measured(cases):
    """Return the bytes that a rank keeps in each case, in a second step of `ROWS` rows."""
    return [_kept(family, sizes, options) for family, sizes, options, _ in cases]


def _kept(family, sizes, options):
    with grid({f"{axis}_size": n for axis, n in sizes.items()}) as manager:
        torch.manual_seed(0)
        model = parallelize(build(family), manager, **options, rehearse=False)
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(64, (ROWS * manager.dp_size, LENGTH), generator=generator)
        batch = shard_global_batch({"input_ids": ids, "labels": ids}, 1, manager)
        train_step(model, batch, manager)
        kept = kept_bytes(model, lambda: train_step(model, batch, manager))
    return kept


def described(family, cut):
    """Return what the description says of it, for a rank that has the whole line."""
    known = describe(lambda: build(family), LENGTH, cuts=[cut], kernels="cpu")
    kinds = known.behaviours(cut)
    blocks = [kinds[block.kind] for block in known.blocks]
    return max(each.shared.at(ROWS) for each in blocks) + sum(each.kept.at(ROWS) for each in blocks)


CASES = [
    ("gemma2", {"dp": 2}, {}, Cut()),
    ("Mixture", {"dp": 2}, {}, Cut()),
    ("Llama", {"tp": 2}, {}, Cut(tp=2)),
    ("Llama", {"cp": 2}, {"cp_method": "all_gather"}, Cut(cp=2, cp_method="all_gather")),
    ("Llama", {"cp": 2}, {"cp_method": "ulysses"}, Cut(cp=2, cp_method="ulysses")),
    ("qwen3", {"tp": 2}, {"sequence_parallel": True}, Cut(tp=2, sequence_parallel=True)),
    ("gpt2", {"tp": 2}, {}, Cut(tp=2)),
    ("Mixture", {"tp": 2}, {}, Cut(tp=2)),
    ("qwen3_moe", {"cp": 2}, {}, Cut(cp=2, cp_method="ring")),
]


@pytest.fixture(scope="module", autouse=True)
def _imported():
    names = (f"transformers.models.{n}.modeling_{n}" for n in ("gpt2", "qwen3", "qwen3_moe"))
    preload("planned", "scaletorch.models", *names)


def test_a_rank_keeps_what_is_described():
    cases = today(CASES, 3)
    found = run_ranks(measured, 2, cases, timeout=200)
    for (family, _, _, cut), *kept in zip(cases, *found, strict=True):
        assert kept == [described(family, cut)] * 2, (family, cut)


def test_nothing_of_a_models_size_is_taken():
    config = LlamaConfig(128256, 16384, 53248, 126, 128, 8)
    cut = Cut(tp=8, cp=4, sequence_parallel=True, cp_method="ring")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    known = describe(lambda: Llama(config).bfloat16(), 8192, cuts=[cut], name="405B")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20  # KiB
    assert round(known.elements / 1e9) == 406
    assert [block.kind for block in known.blocks] == [0, *[1] * 126, 2]
    layer = known.behaviours(cut)[1]
    matmuls = sum(
        w.flops.at(1) for w in layer.work if w.operation == "matmul" and w.phase == "forward"
    )
    weights = sum(p.local for p in layer.parameters if p.elements > 2**20)
    assert matmuls == 2 * weights * 8192 / 4
    sent = Counter()
    for each in layer.sent:
        if each.phase == "forward":
            sent[each.axis, each.operation] += each.count
    assert sent["tp", "all_gather"] == sent["tp", "reduce_scatter"] == 2
    assert sent["cp", "send"] == 2 * 3


MIB = 2**20
ON_CARD = LlamaConfig(32000, 2048, 5632, num_layers=16, num_heads=16, num_kv_heads=4)


def test_a_card_keeps_what_its_kernels_keep_and_takes_as_long_as_it_took():
    """853 M in bfloat16, 2 micro-batches of 4 x 2,048: an H200 had 18.20 GiB and 188 to 201 ms."""
    known = describe(lambda: Llama(ON_CARD).bfloat16(), 2048, cuts=[])
    layer = known.behaviours(Cut())[1]
    hidden, inner, tables = 32, 88, 0.5  # MiB of a token's features, and of angles
    of_norms = 2 * 2 * hidden  # what goes in and what comes out
    of_attention = hidden + 2 * hidden / 4 + hidden  # q, grouped k and v, out
    of_mlp = 4 * inner  # gate, its silu, up, their product
    sums = 0.5 + 4 * 4 * 2048 / MIB * 4  # log-sum-exp of 16 heads; mean and rstd of two norms
    kept = of_norms + of_attention + of_mlp + 4 * tables + sums
    assert layer.kept.at(4) / MIB == pytest.approx(kept, rel=1e-3)
    layout = Layout(Grid(), micro_rows=4, micro_batches=2)
    (held,) = memory(known, layout)
    assert held.total / 2**30 == pytest.approx(18.20, rel=0.03)
    took = time(known, layout, cluster_named("H200", 1))
    assert took.low < 0.188 < 0.201 < took.high
    assert took.step == pytest.approx(0.195, rel=0.05)


class Mixed(nn.Module):
    """Attention with a mask, dropout and a norm, in a layer."""

    def __init__(self, heads, dtype):
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 64, dtype=dtype), nn.Linear(64, 64, dtype=dtype)
        self.layers = nn.ModuleList([Attending(heads, dtype)])

    def forward(self, input_ids):
        return self.head(self.layers[0](self.embed(input_ids)))


class Attending(nn.Module):
    def __init__(self, heads, dtype):
        super().__init__()
        self.heads = heads
        self.norm = nn.RMSNorm(64, dtype=dtype)
        self.key = nn.Linear(64, 16 * heads, dtype=dtype)

    def forward(self, x):
        q = x.unflatten(-1, (4, 16)).transpose(1, 2)
        k = self.key(x).unflatten(-1, (self.heads, 16)).transpose(1, 2)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        out = F.scaled_dot_product_attention(q, k, k, mask, enable_gqa=self.heads < 4)
        out = F.dropout(out.transpose(1, 2).flatten(-2), 0.1)
        return x + self.norm(out)


@pytest.mark.parametrize("heads", [4, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_masks_and_dropout_on_a_card(heads, dtype):
    """Masks are added, those of dropout have a byte; grouped heads of float32 keep all scores."""
    kept = {
        kernels: describe(lambda: Mixed(heads, dtype), 64, cuts=[], kernels=kernels)
        .behaviours(Cut())[1].kept.per_row
        for kernels in ("cpu", "cuda")
    }  # fmt: skip
    scores = 4 * 64 * 64 * 4
    if dtype == torch.float32 and heads == 2:
        assert kept["cuda"] > scores
    else:
        # For a mask of floats one of bytes; the CPU has K and V once for each head of queries.
        assert kept["cuda"] <= kept["cpu"] - (dtype.itemsize - 1) * 64 * 64


def test_experts_take_as_many_tokens_wherever_they_are():
    cuts = [Cut(), Cut(ep=2), Cut(ep=4)]
    known = describe(lambda: build("Mixture"), 64, cuts=cuts)
    work = set()
    for cut in cuts:
        layer = known.behaviours(cut)[1]
        experts = [parameter for parameter in layer.parameters if parameter.expert]
        assert {each.elements // each.local for each in experts} == {cut.ep} - {1}
        work.add(sum(w.flops.at(4) for w in layer.work if w.operation == "matmul"))
        assert any(s.operation == "all_to_all" for s in layer.sent) == (cut.ep > 1)
    assert len(work) == 1


def test_a_cut_that_a_model_cannot_have_is_refused():
    known = describe(lambda: build("Llama"), LENGTH, cuts=[Cut(tp=2), Cut(tp=8)])
    assert known.refused.keys() == {Cut(tp=8)}, known.refused


# Parameters and states of few bytes: other dtypes, experts, uneven and tied stages.
HOLDING = [
    Case("small mixture", 5, False, "float32", 16,
         Layout(Grid(dp=4, ep=2), zero=2, micro_rows=2, micro_batches=3), sum_item=8),
    Case("small", 5, True, "bfloat16", 16,
         Layout(Grid(pp=2, dp=2), zero=2, schedule="dualpipe_v", chunks=2, micro_batches=5),
         sum_item=4),
]  # fmt: skip
PEAKS = [  # pipelines; activations, buckets or shards at the peak; experts; tied weights
    Case("large mixture", 2, True, "float32", 64,
         Layout(Grid(cp=2, dp=2, ep=2), zero=2, recompute="full", micro_batches=2)),
    Case("wide", 8, False, "float32", 64,
         Layout(Grid(tp=2, pp=2), True, "full", schedule="zb_v", chunks=2, micro_rows=4,
                micro_batches=2)),
    Case("large", 4, True, "float32", 64, Layout(Grid(dp=4), zero=1, recompute="full")),
    Case("large", 8, False, "float32", 64,
         Layout(Grid(tp=2, dp=2), True, zero=2, micro_rows=3, micro_batches=3)),
    Case("large", 8, False, "float32", 64,
         Layout(Grid(pp=2, dp=2), zero=2, recompute="full", micro_rows=4, micro_batches=4,
                schedule="interleaved_1f1b", chunks=2)),
    Case("large", 8, False, "float32", 64,
         Layout(Grid(pp=2, dp=2), zero=2, recompute="full", micro_rows=2, micro_batches=4,
                schedule="zb_v", chunks=2)),
    Case("large mixture", 8, False, "float32", 64,
         Layout(Grid(pp=2, dp=2), zero=2, recompute="full", micro_rows=4, micro_batches=2,
                schedule="zb_h1")),
    Case("large", 8, True, "float32", 64,
         Layout(Grid(pp=2, dp=2), zero=2, recompute="selective", micro_rows=3,
                schedule="dualpipe_v", chunks=2)),
]  # fmt: skip
GATHERING = [
    Case("wide", 3, False, "float32", 64,
         Layout(Grid(dp=2), zero=3, recompute="full", micro_rows=4, micro_batches=2)),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:Memory block of unknown size")
def test_ranks_hold_what_is_planned():
    cases = [*today(PEAKS, 4), *today(HOLDING, 2)]
    for case, *own in zip(cases, *run_ranks(peaks, 4, cases, timeout=250), strict=True):
        assert not list(differences(case, own))
        if case not in HOLDING:
            assert not list(higher(case, own))


@pytest.mark.filterwarnings("ignore:Memory block of unknown size")
def test_fully_sharded_ranks_hold_what_is_planned():
    for case, *own in zip(GATHERING, *run_ranks(gathering, 2, GATHERING, timeout=200), strict=True):
        assert not [*differences(case, own), *higher(case, own)]
