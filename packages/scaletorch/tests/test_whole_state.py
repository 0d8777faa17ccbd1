"""The plain model's own ways to load and save, on ranks that have a shard or a stage of it."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from scaletorch.compose import full_state_dict, parallelize
from scaletorch.dist import barrier, get_rank
from scaletorch.dist.errors import StateError
from scaletorch.dist.testing import run_ranks
from scaletorch.parallel.pg_manager import (
    destroy_process_group_manager,
    setup_process_group_manager,
)

SIZES = {
    "vocab_size": 16, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 4,
    "num_attention_heads": 2, "num_key_value_heads": 2,
}  # fmt: skip
LAYOUTS = [
    ({"tp_size": 2}, {}),
    ({"tp_size": 2}, {"sequence_parallel": True}),
    ({"pp_size": 2}, {}),
    ({"pp_size": 2}, {"schedule": "zb_v"}),
    ({"dp_size": 2}, {}),
]


def llama(seed, tied):
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=tied))


def loaded_and_saved(folder):
    for at, (sizes, options) in enumerate(LAYOUTS):
        manager = setup_process_group_manager(**sizes)
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
            path = folder / f"{at}{tied}"
            if "dp_size" not in sizes:
                with pytest.raises(StateError, match=r"save_pretrained would .*export_safetensors"):
                    model.save_pretrained(path)
                with pytest.raises(StateError, match="save_pretrained would write this rank's"):
                    model.module.module.save_pretrained(path, state_dict=own)
            if get_rank() == 0:
                model.save_pretrained(path, state_dict=now)
                theirs = LlamaForCausalLM.from_pretrained(path).state_dict()
                assert all(torch.equal(theirs[name], value) for name, value in whole.items())
            barrier()
        destroy_process_group_manager()


def test_whole_states_load_and_shards_are_not_saved_for_them(tmp_path):
    run_ranks(loaded_and_saved, 2, tmp_path, timeout=200)
