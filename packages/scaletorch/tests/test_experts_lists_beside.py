"""Blocks that loop over experts, with adapters of peft, with `torch.compile`, and in recordings."""

import math

import pytest
import torch
import torch.nn.functional as F
from test_experts_lists import batch, build

from scaletorch import bisect
from scaletorch.checkpoint import export_adapter
from scaletorch.compose import (
    add_adapters,
    full_gradients,
    parallelize,
    shard_global_batch,
    train_step,
)
from scaletorch.dist import InvalidArgumentError
from scaletorch.dist.testing import preload, relative_error, run_ranks, worst
from scaletorch.parallel.data_parallel import shard_optimizer
from scaletorch.parallel.pg_manager import (
    destroy_process_group_manager,
    setup_process_group_manager,
)

peft = pytest.importorskip("peft")

pytestmark = [
    pytest.mark.timeout(300),  # the first ranks import peft, and the compiler
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:Dynamo (detected a call to a|does not know how)"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]

PLAN = {"**.mlp.experts": "experts"}  # ** stands for peft's own names in front, too
TWO = {"dp_size": 2, "ep_size": 2}


@pytest.fixture(scope="module", autouse=True)
def _imports():
    preload("torch._dynamo", "peft")


def adapted(kind):
    torch.manual_seed(1)
    targets = ["q_proj", "gate", "w1", "w2"]
    config = peft.LoraConfig(init_lora_weights=False, r=2, target_modules=targets)
    return peft.get_peft_model(build(kind, 0.0, 5), config).double()


def steps_of(model, step):
    """Return the loss and gradients of two steps."""
    found, trained = [], [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    if hasattr(model, "bucket_managers"):
        shard_optimizer(optimizer, model)
    for number in range(2):
        found.append(step(model, batch(number)))
        optimizer.step()
        optimizer.zero_grad()
    return found


def alone(model, whole):
    loss = F.cross_entropy(model(whole["input_ids"]).flatten(0, 1), whole["labels"].flatten())
    loss.backward()
    return loss.detach(), {
        n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
    }


def together(model, whole):
    loss = train_step(model, shard_global_batch(whole, 1, model=model))
    return loss, full_gradients(model)


def train_adapters(kind, sizes, folder):
    manager = setup_process_group_manager(**sizes)
    model = parallelize(adapted(kind), manager, plan=PLAN)
    found = steps_of(model, together)
    export_adapter(model, folder)
    destroy_process_group_manager()
    return found


@pytest.mark.parametrize("sizes", [TWO, {"tp_size": 2, "ep_size": 2}])
@pytest.mark.parametrize("kind", ["deepseek", "named"])
def test_adapters_in_experts_and_around_train_like_one_process(kind, sizes, tmp_path):
    plain = adapted(kind)
    expected = steps_of(plain, alone)
    for found in run_ranks(train_adapters, 2, kind, sizes, tmp_path, timeout=120):
        for (loss, gradients), (one, known) in zip(found, expected, strict=True):
            assert relative_error(loss, one) < 1e-11
            some = {n: g for n, g in known.items() if g.abs().max() > 1e-12}
            assert {n.split(".")[-4] for n in some} == {"q_proj", "gate", "w1", "w2"}
            assert worst(relative_error(gradients[n], g) for n, g in some.items()) < 1e-10
    again = peft.PeftModel.from_pretrained(build(kind, 0.0, 5), tmp_path).double()
    ids = batch(9)["input_ids"]
    assert relative_error(again(ids), plain(ids)) < 1e-9


def refused():
    model = parallelize(build("skipping", 0.0, 5), setup_process_group_manager(**TWO), plan=PLAN)
    with pytest.raises(InvalidArgumentError, match="it is in experts, which are divided"):
        add_adapters(model, peft.LoraConfig(target_modules=["q_proj", "w1"]))
    model = add_adapters(model, peft.LoraConfig(target_modules=["q_proj"]))
    assert math.isfinite(together(model, batch(0))[0])
    destroy_process_group_manager()


def test_adapters_that_come_later_are_refused_in_lists():
    run_ranks(refused, 2, timeout=120)


def compiled():
    manager, found, operations = setup_process_group_manager(**TWO), [], []

    def noting(graph, _):
        nodes = [n for m in graph.modules() if hasattr(m, "graph") for n in m.graph.nodes]
        operations.append(sum(node.op.startswith("call") for node in nodes))
        return graph

    for compiles in (False, True):
        model = build("skipping", 0.0, 4)
        for layer in model.layers if compiles else ():
            layer.compile(backend=noting)
        model = parallelize(model, manager, plan=PLAN)
        together(model, batch(0))  # the first step runs as it is written, so that graphs are seen
        found.append(together(model, batch(0)))
    destroy_process_group_manager()
    (loss, gradients), (own, others) = found
    some = {n: g for n, g in gradients.items() if g.abs().max() > 1e-12}
    errors = (relative_error(others[n], g) for n, g in some.items())
    return worst([relative_error(own, loss), *errors]), sum(operations)


def test_a_looped_block_in_a_compiled_layer_is_left_to_python():
    for error, operations in run_ranks(compiled, 2, timeout=250):
        assert error < 1e-12
        assert operations > 30  # attention, norms and residuals


def recorded(folder, sizes, factor):
    manager = setup_process_group_manager(**sizes)
    model = parallelize(build("deepseek", 0.0, 4), manager, plan=PLAN)
    if factor != 1 and manager.dp_rank == 1:
        with torch.no_grad():
            model.get_parameter("module.module.layers.2.mlp.experts.2.w2.weight").mul_(factor)
    with bisect.record(folder, model) as tape:
        tape.put("loss", train_step(model, shard_global_batch(batch(0), 1, model=model)))
    destroy_process_group_manager()


def test_recordings_of_looped_blocks(tmp_path):
    run_ranks(recorded, 1, tmp_path / "one", {}, 1)
    run_ranks(recorded, 2, tmp_path / "two", TWO, 1)
    run_ranks(recorded, 2, tmp_path / "wrong", TWO, 1.01)
    assert bisect.compare(tmp_path / "one", tmp_path / "two").sound
    (found,) = bisect.compare(tmp_path / "one", tmp_path / "wrong").found
    assert found.birth.judged.key.name == "layers.2.mlp.experts.2.w2"
    assert "rank 1 has 1.01 times the right values" in " ".join(found.how)
