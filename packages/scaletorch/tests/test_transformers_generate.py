"""`generate`, loading and saving of transformers on ranks: as in one process, or words why not."""

import copy

import pytest
import torch
from tiny_transformers import tiny
from training import grid

from scaletorch.compose import full_state_dict, parallelize
from scaletorch.dist import barrier, get_rank
from scaletorch.dist.errors import StateError
from scaletorch.dist.testing import distributed_test, preload, run_ranks

transformers = pytest.importorskip("transformers")
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
        with grid(sizes) as manager:
            found.append(every_way(parallelize(build(), manager, rehearse=False).eval()))
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
    with grid({axis: 2}) as manager:
        plain = build()
        assert plain.generate(**prompts(), max_new_tokens=2).shape == (2, 9)
        parallel = parallelize(plain, manager, rehearse=False)
        calls = []
        plain.register_forward_pre_hook(lambda *_: calls.append(1))
        for model in (parallel, plain, copy.deepcopy(plain)):
            with pytest.raises(StateError, match=REFUSED) as caught:
                model.generate(**prompts(), max_new_tokens=2)
            assert WHY[axis] in str(caught.value)
    assert not calls


STATE_SIZES = {
    "vocab_size": 16, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 4,
    "num_attention_heads": 2, "num_key_value_heads": 2,
}  # fmt: skip
STATE_LAYOUTS = [
    ({"tp_size": 2}, {}),
    ({"tp_size": 2}, {"sequence_parallel": True}),
    ({"pp_size": 2}, {}),
    ({"pp_size": 2}, {"schedule": "zb_v"}),
    ({"dp_size": 2}, {}),
]


def llama(seed, tied):
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(**STATE_SIZES, tie_word_embeddings=tied)
    return transformers.LlamaForCausalLM(config)


@distributed_test(2, timeout=200)
def test_whole_states_load_and_shards_are_not_saved_for_them(tmp_path):
    for at, (sizes, options) in enumerate(STATE_LAYOUTS):
        with grid(sizes) as manager:
            for tied in (False, True):
                model = parallelize(llama(0, tied), manager, **options, rehearse=False)
                whole = llama(1, tied).state_dict()
                for target in (model, model.module.module):
                    with torch.no_grad():
                        for parameter in model.parameters():
                            parameter.zero_()
                    target.load_state_dict(whole)
                    now = full_state_dict(model)
                    assert all(torch.equal(now[name], value) for name, value in whole.items())
                own = model.state_dict()
                model.load_state_dict(own)  # this rank's own fits as before
                with pytest.raises(RuntimeError, match="size mismatch"):
                    model.load_state_dict({name: value[..., :1] for name, value in whole.items()})
                path = tmp_path / f"{at}{tied}"
                if "dp_size" not in sizes:
                    with pytest.raises(StateError, match=r"save_pretrained would .*export_safe"):
                        model.save_pretrained(path)
                    with pytest.raises(StateError, match="save_pretrained would write this rank's"):
                        model.module.module.save_pretrained(path, state_dict=own)
                if get_rank() == 0:
                    model.save_pretrained(path, state_dict=now)
                    theirs = transformers.LlamaForCausalLM.from_pretrained(path).state_dict()
                    assert all(torch.equal(theirs[name], value) for name, value in whole.items())
                barrier()
