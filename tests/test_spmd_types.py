"""The checker of `spmd_types` agrees with our placements, on models of transformers under tp."""

import pytest

pytest.importorskip("transformers")
pytest.importorskip("spmd_types")

import spmd_types
import torch
import torch.distributed as dist
from spmd_types.checker import typecheck
from sweeps import today
from tools.families.tiny import tiny
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from scaletorch.dist import functional, launch
from scaletorch.dist.testing import RankPool
from scaletorch.parallel.tensor_parallel import apply_tensor_parallel, vocab_parallel_cross_entropy
from scaletorch.parallel.tensor_parallel.regions.region import sum_gradient
from scaletorch.parallel.tensor_parallel.sharing.gradient_paths import Reach
from scaletorch.parallel.tensor_parallel.sharing.gradient_sums import find_sums, whole_parameters

FAMILIES = (
    "llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "phi", "phi3", "gpt2",
    "gpt_neox", "gpt_neo", "gpt_bigcode", "gptj", "opt", "bloom", "falcon", "olmo2", "granite",
    "glm4", "cohere", "stablelm", "codegen", "nemotron", "smollm3", "mixtral", "qwen3_moe",
    "deepseek_v3", "glm4_moe", "gpt_oss", "bert", "roberta", "bart",
)  # fmt: skip


def checked(name, *, sequence_parallel, mistake=False):
    """Run a model under the checker; its parameters have the types that tp has inferred."""
    torch.manual_seed(0)
    config = tiny(CONFIG_MAPPING[name], name)
    model = AutoModelForCausalLM.from_config(config).train()
    world = dist.group.WORLD
    apply_tensor_parallel(model, None, world, sequence_parallel=sequence_parallel)
    ids = torch.randint(1, 60, (2, 16))
    model(input_ids=ids).logits.sin().sum().backward()  # tp infers which gradients are partial
    sums, whole = find_sums(model), whole_parameters(model)
    replicated = spmd_types.I if mistake else spmd_types.R
    with typecheck(strict_mode="permissive", local=True):
        for own, parameter in model.named_parameters():
            partial = sums.reach(parameter) is Reach.PARTIAL
            kind = spmd_types.V if own not in whole else replicated if partial else spmd_types.I
            spmd_types.assert_type(parameter, {world: kind})
        for buffer in model.buffers():
            spmd_types.assert_type(buffer, {world: spmd_types.I})
        spmd_types.assert_type(ids, {world: spmd_types.I})
        logits = model(input_ids=ids).logits
        found = spmd_types.get_local_type(logits)
    assert [*found.values()] == [spmd_types.I]


@pytest.fixture(scope="module")
def ranks():
    with RankPool(2, timeout=100) as pool:
        yield pool


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_families_have_the_types_that_tensor_parallelism_infers(ranks, sequence_parallel):
    for name in today(FAMILIES, 3):
        ranks.run(checked, name, sequence_parallel=sequence_parallel)


def refused(name):
    with pytest.raises(spmd_types.SpmdTypeError, match=r"Invariant type .* cannot mix"):
        checked(name, sequence_parallel=False, mistake=True)


def test_a_gradient_that_nobody_sums_is_seen(ranks):
    ranks.run(refused, "qwen3")  # norms of queries and keys


def calls(dim):
    """Each differentiable collective, sums over replicas, and the loss of a sharded vocabulary."""
    world = dist.group.WORLD
    x = {
        kind: torch.randn(4, 4, requires_grad=True)
        for kind in (spmd_types.I, spmd_types.P, spmd_types.V)
    }
    with typecheck(local=True):
        for kind, tensor in x.items():
            spmd_types.assert_type(tensor, {world: kind})
        invariant, term, shard = x.values()
        found = {
            "copy": functional.copy(invariant, world),
            "reduce": functional.reduce(term, world),
            "all_reduce": functional.all_reduce(term, world),
            "all_gather": functional.all_gather(shard, dim, world),
            "reduce_scatter": functional.reduce_scatter(term, dim, world),
            "gather": functional.gather(shard, dim, world),
            "split": functional.split(invariant, dim, world),
            "all_to_all": functional.all_to_all(shard, 1 - dim, dim, world),
        }
        found["replica"] = sum_gradient(shard, lambda gradient: gradient, world)
        targets = torch.zeros(4, dtype=torch.long)
        spmd_types.assert_type(targets, {world: spmd_types.I})
        found["loss"] = vocab_parallel_cross_entropy(shard, targets, group=world, vocab_size=8)
        return {
            name: next(iter(spmd_types.get_local_type(each).values())).name
            for name, each in found.items()
        }


def test_each_collective_returns_its_placement():
    for dim in (0, 1):
        for found in launch(calls, 2, dim):
            assert found == {
                "copy": "R", "reduce": "I", "all_reduce": "R", "all_gather": "R",
                "reduce_scatter": "V", "gather": "I", "split": "V", "all_to_all": "V",
                "replica": "V", "loss": "I",
            }  # fmt: skip
