"""`generate` of transformers on ranks: the tokens that one process draws, or words why not."""

import copy

import pytest
import torch
from tiny_transformers import tiny

from scaletorch.compose import parallelize
from scaletorch.dist.errors import StateError
from scaletorch.dist.testing import distributed_test, preload, run_ranks
from scaletorch.parallel.pg_manager import (
    destroy_process_group_manager,
    setup_process_group_manager,
)

pytest.importorskip("transformers")
preload("transformers.models.llama.modeling_llama", "transformers.generation.utils")

SIZES = {  # no two ranks divide the vocabulary
    "vocab_size": 67, "num_attention_heads": 8, "num_key_value_heads": 4,
    "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
WAYS = {
    "greedy": {"do_sample": False},
    "without a cache": {"do_sample": False, "use_cache": False},
    "static cache": {"do_sample": False, "cache_implementation": "static"},
    "beams": {"do_sample": False, "num_beams": 3},
    "sampled": {"do_sample": True, "temperature": 2.0},
}


def build():
    return tiny("Llama", **SIZES).eval()


def prompts():
    """Return two prompts, one of them padded on the left."""
    ids = torch.randint(1, 67, (2, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    ids[1, :3], mask[1, :3] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def every_way(model):
    """Return the tokens that each way draws."""
    found = []
    for how in WAYS.values():
        torch.manual_seed(2)
        found.append(model.generate(**prompts(), max_new_tokens=12, **how).tolist())
    return found


def drawn_on_ranks():
    found = []
    for sizes in ({"tp_size": 2}, {"dp_size": 2}):
        manager = setup_process_group_manager(**sizes)
        found.append(every_way(parallelize(build(), manager, rehearse=False).eval()))
        destroy_process_group_manager()
    return found


def test_sharded_layers_draw_the_tokens_of_one_process():
    expected = every_way(build())
    assert len({str(each) for each in expected[:3]}) == 1
    assert expected[0] != expected[-1]
    for found in run_ranks(drawn_on_ranks, 2):
        assert found == [expected] * 2


REFUSED = r"LlamaForCausalLM\.generate calls .* tensor and data .*cp_size=1, pp_size=1.* or export"
WHY = {"cp_size": "its shard of a sequence", "pp_size": "its stages of the pipeline alone"}


@pytest.mark.parametrize("axis", WHY)
@distributed_test(world_size=2)
def test_divided_sequences_and_layers_refuse_with_the_way_out(axis):
    """Every holder of the model's `generate` refuses, without a call of its forward."""
    manager = setup_process_group_manager(**{axis: 2})
    plain = build()
    assert plain.generate(**prompts(), max_new_tokens=2).shape == (2, 9)
    parallel = parallelize(plain, manager, rehearse=False)
    calls = []
    plain.register_forward_pre_hook(lambda *_: calls.append(1))
    for model in (parallel, plain, copy.deepcopy(plain)):
        with pytest.raises(StateError, match=REFUSED) as caught:
            model.generate(**prompts(), max_new_tokens=2)
        assert WHY[axis] in str(caught.value)
    destroy_process_group_manager()
    assert not calls
