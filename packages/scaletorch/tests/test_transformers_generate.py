"""`generate` of transformers on ranks: the tokens that one process draws, or words why not."""

import copy

import pytest
import torch

from scaletorch.compose import parallelize
from scaletorch.dist.errors import StateError
from scaletorch.dist.testing import preload, run_ranks
from scaletorch.parallel.pg_manager import (
    destroy_process_group_manager,
    setup_process_group_manager,
)

pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 67,  # no two ranks divide it
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "initializer_range": 0.3,  # the usual one leaves all tokens nearly alike
    "eos_token_id": None,
    "pad_token_id": 0,
}
WAYS = {
    "greedy": {"do_sample": False},
    "without a cache": {"do_sample": False, "use_cache": False},
    "static cache": {"do_sample": False, "cache_implementation": "static"},
    "beams": {"do_sample": False, "num_beams": 3},
    "sampled": {"do_sample": True, "temperature": 2.0},
}


@pytest.fixture(autouse=True, scope="module")
def llama_in_the_server():
    preload("transformers.models.llama.modeling_llama")
    preload("transformers.generation.utils")


def build():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES)).double().eval()


def prompts():
    """Return two prompts, one of them padded on the left."""
    ids = torch.randint(1, 67, (2, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    ids[1, :3], mask[1, :3] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def tokens(model, way):
    torch.manual_seed(2)
    drawn = model.generate(**prompts(), max_new_tokens=12, **WAYS[way])
    return drawn.tolist()


def drawn_on_ranks(sizes):
    """Return what each way gives."""
    manager = setup_process_group_manager(**sizes)
    model = parallelize(build(), manager, rehearse=False).eval()
    drawn = [tokens(model, way) for way in WAYS]
    destroy_process_group_manager()
    return drawn


def layouts(every):
    return [drawn_on_ranks(sizes) for sizes in every]


def test_sharded_layers_draw_the_tokens_of_one_process():
    expected = [tokens(build(), way) for way in WAYS]
    assert len({str(each) for each in expected[:3]}) == 1
    assert expected[0] != expected[-1]
    for found in run_ranks(layouts, 2, [{"tp_size": 2}, {"dp_size": 2}]):
        assert found == [expected] * 2


def refused(sizes):
    """Let every holder of the model's `generate` refuse, without a call of its forward."""
    manager = setup_process_group_manager(**sizes)
    plain = build()
    whole = plain.generate(**prompts(), max_new_tokens=2)
    parallel = parallelize(plain, manager, rehearse=False)
    calls = []
    plain.register_forward_pre_hook(lambda *_: calls.append(1))
    for model in (parallel, plain, copy.deepcopy(plain)):
        with pytest.raises(StateError, match=REFUSED) as caught:
            model.generate(**prompts(), max_new_tokens=2)
    destroy_process_group_manager()
    assert whole.shape == (2, 9)
    assert not calls
    return str(caught.value)


REFUSED = r"LlamaForCausalLM\.generate calls .* tensor and data .*cp_size=1, pp_size=1.* or export"
WHY = {"cp_size": "its shard of a sequence", "pp_size": "its stages of the pipeline alone"}


def test_divided_sequences_and_layers_refuse_with_the_way_out():
    for axis, why in WHY.items():
        assert all(why in message for message in run_ranks(refused, 2, {axis: 2}))
