"""What a description says of a model is what its real ranks keep for backward, and send."""

import gc
import resource
from collections import Counter
from itertools import accumulate

import pytest
import torch
from torch.profiler import profile

from scaletorch.compose import parallelize, shard_global_batch, train_step
from scaletorch.dist.errors import InvalidArgumentError
from scaletorch.dist.testing import preload, run_ranks
from scaletorch.models import Llama, LlamaConfig, Mixture, MixtureConfig
from scaletorch.parallel.pg_manager import (
    destroy_process_group_manager,
    setup_process_group_manager,
)
from scaletorch.plan import Cut
from scaletorch.plan.describing import describe
from scaletorch.plan.memory.measured import Kept
from scaletorch.plan.written import read, write

LENGTH, ROWS = 16, 4
WIDER = LlamaConfig(1024, 128, 352, 4, 4, 2)  # its activations are more than its parameters
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
    if family == "wider":
        return Llama(WIDER)
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


def measured(family, sizes, options, length=LENGTH):
    """Return the bytes that a rank keeps in its second step, of one micro-batch of `ROWS` rows.

    Also the most that the allocator gave in it, beside what was there before, and what it did not
    get back: gloo's threads hold the tensors of their last calls until the next ones.
    """
    manager = setup_process_group_manager(**{f"{axis}_size": n for axis, n in sizes.items()})
    torch.manual_seed(0)
    model = parallelize(build(family), manager, **options, rehearse=False)
    generator = torch.Generator().manual_seed(manager.dp_rank)
    ids = torch.randint(64, (ROWS * manager.dp_size, length), generator=generator)
    batch = shard_global_batch({"input_ids": ids, "labels": ids}, 1, manager)
    train_step(model, batch, manager)
    kept = Kept(model)
    gc.collect()  # what models before it left behind would count as given back in this step
    with kept, profile(profile_memory=True) as profiled:
        train_step(model, batch, manager)
    destroy_process_group_manager()
    events = profiled.profiler.kineto_results.events()
    taken = [*accumulate(event.nbytes() for event in events if event.name() == "[memory]")]
    return kept.most, max(taken), max(taken[-1], 0)


def described(family, cut, length=LENGTH):
    """Return what the description says of both, for a rank that has the whole line."""
    known = describe(lambda: build(family), length, cuts=[cut])
    kinds = known.behaviours(cut)
    blocks = [kinds[block.kind] for block in known.blocks]
    kept, most = max(each.shared.at(ROWS) for each in blocks), 0
    for block in blocks:
        kept += block.kept.at(ROWS)
        most = max(most, kept + max(block.forward_peak.at(ROWS), block.backward_peak.at(ROWS)))
    return kept, most


CASES = {
    1: [("gemma2", {}, {}, Cut()), ("Mixture", {}, {}, Cut())],
    2: [
        ("Llama", {"tp": 2}, {}, Cut(tp=2)),
        ("Llama", {"cp": 2}, {"cp_method": "all_gather"}, Cut(cp=2, cp_method="all_gather")),
        ("Llama", {"cp": 2}, {"cp_method": "ulysses"}, Cut(cp=2, cp_method="ulysses")),
        ("qwen3", {"tp": 2}, {"sequence_parallel": True}, Cut(tp=2, sequence_parallel=True)),
        ("gpt2", {"tp": 2}, {}, Cut(tp=2)),
        ("Mixture", {"tp": 2}, {}, Cut(tp=2)),
        ("qwen3_moe", {"cp": 2}, {}, Cut(cp=2, cp_method="ring")),
    ],
    4: [
        (
            "Llama", {"tp": 2, "cp": 2}, {"sequence_parallel": True},
            Cut(tp=2, cp=2, sequence_parallel=True, cp_method="ring"),
        ),
    ],
}  # fmt: skip


def measured_all(cases):
    """Return what this rank keeps in each case."""
    return [measured(family, sizes, options) for family, sizes, options, _ in cases]


@pytest.fixture(scope="module", autouse=True)
def _imported():
    families = ("gpt2", "qwen3", "qwen3_moe")
    code = [f"transformers.models.{name}.modeling_{name}" for name in families]
    preload("scaletorch.compose", "scaletorch.models", *code)  # by all ranks at once


@pytest.mark.parametrize("ranks", CASES)
def test_a_rank_keeps_what_is_described(ranks):
    found = run_ranks(measured_all, ranks, CASES[ranks], timeout=200)
    for (family, _, _, cut), *each in zip(CASES[ranks], *found, strict=True):
        assert [rank[0] for rank in each] == [described(family, cut)[0]] * ranks, (family, cut)


WIDE = [
    ({"tp": 2}, {}, Cut(tp=2)),
    ({"tp": 2}, {"sequence_parallel": True}, Cut(tp=2, sequence_parallel=True)),
    ({"cp": 2}, {}, Cut(cp=2, cp_method="ring")),
    (
        {"tp": 2}, {"sequence_parallel": True, "recompute": "selective"},
        Cut(tp=2, sequence_parallel=True, selective=True),
    ),
]  # fmt: skip


def measured_wide():
    """Return what the allocator gives this rank in each case."""
    return [measured("wider", sizes, options, 128)[1:] for sizes, options, _ in WIDE]


@pytest.mark.filterwarnings("ignore:Memory block of unknown size")
def test_the_allocators_peak_is_the_one_described():
    for (_, _, cut), *peaks in zip(WIDE, *run_ranks(measured_wide, 2, timeout=200), strict=True):
        most = described("wider", cut, 128)[1]
        for peak, rest in peaks:
            assert 0.98 * (peak - rest) <= most <= 1.02 * peak, (cut, peak, rest)


def test_nothing_of_a_models_size_is_taken():
    config = LlamaConfig(128256, 16384, 53248, 126, 128, 8)
    cut = Cut(tp=8, cp=16, sequence_parallel=True, cp_method="ring")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    known = describe(lambda: Llama(config).bfloat16(), 8192, cuts=[cut], name="405B")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20  # KiB
    assert round(known.elements / 1e9) == 406
    assert [block.kind for block in known.blocks] == [0, *[1] * 126, 2]
    layer = known.behaviours(cut)[1]
    matmuls = sum(
        w.flops.at(1) for w in layer.work if w.operation == "matmul" and w.phase == "forward"
    )
    weights = sum(p.local[0] for p in layer.parameters if p.elements > 2**20)
    assert matmuls == 2 * weights * 8192 / 16
    sent = Counter()
    for each in layer.sent:
        if each.phase == "forward":
            sent[each.axis, each.operation] += each.count
    assert sent["tp", "all_gather"] == sent["tp", "reduce_scatter"] == 2
    assert sent["cp", "send"] == 2 * 15


def test_experts_take_as_many_tokens_wherever_they_are():
    cuts = [Cut(), Cut(ep=2), Cut(ep=4)]
    known = describe(lambda: build("Mixture"), 64, cuts=cuts)
    found = set()
    for cut in cuts:
        layer = known.behaviours(cut)[1]
        experts = [parameter for parameter in layer.parameters if parameter.expert]
        assert (
            sum(each.local[0] for each in experts) * cut.ep
            == sum(each.elements for each in experts)
            or cut.ep == 1
        )
        found.add(sum(w.flops.at(4) for w in layer.work if w.operation == "matmul"))
        assert any(s.operation == "all_to_all" for s in layer.sent) == (cut.ep > 1)
    assert len(found) == 1


def test_a_description_is_a_file(tmp_path):
    known = describe(lambda: build("Llama"), LENGTH, cuts=[Cut(tp=2), Cut(tp=8)])
    assert known.refused.keys() == {Cut(tp=8)}, known.refused
    write(known, tmp_path / "one.json")
    assert read(tmp_path / "one.json") == known
    (tmp_path / "two.json").write_text("{}")
    with pytest.raises(InvalidArgumentError, match="is no description of a model"):
        read(tmp_path / "two.json")


def needs_data():
    model = torch.nn.Linear(2, 2)
    model.weight.data.fill_(float(model.weight.sum()))
    return model


def test_a_model_that_needs_data_is_refused():
    with pytest.raises(InvalidArgumentError, match="cannot be built without data"):
        describe(needs_data, LENGTH)
    with pytest.raises(InvalidArgumentError, match="returned list"):
        describe(list, LENGTH)
    with pytest.raises(InvalidArgumentError, match=r"expected one nn\.ModuleList"):
        describe(lambda: torch.nn.Linear(2, 2), LENGTH)
