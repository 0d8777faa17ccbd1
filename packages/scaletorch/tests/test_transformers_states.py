"""Families of transformers whose layers pass a state along the sequence, context parallel."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as c10d
import torch.nn.functional as F

from scaletorch.dist.errors import InvalidArgumentError
from scaletorch.dist.testing import preload, relative_error, run_ranks, worst
from scaletorch.parallel.context_parallel import apply_context_parallel, shard_batch

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.timeout(300)
BOUND = 1e-6  # parts of these models compute in float32 whatever their parameters are
SIZES = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "use_cache": False,
    "initializer_range": 0.3,
}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    **{f"linear_{each}_head_dim": 8 for each in ("key", "value")},
    **{f"linear_num_{each}_heads": 4 for each in ("key", "value")},
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES = {  # `tools/families` has all of them on two ranks
    "Mamba2": {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 4},
    "Qwen3Next": LINEAR | EXPERTS | {"shared_expert_intermediate_size": 16},
}


def _build(name):
    torch.manual_seed(3)
    config = getattr(transformers, f"{name}Config")(**SIZES | FAMILIES[name])
    model = getattr(transformers, f"{name}ForCausalLM")(config).double()
    if "num_experts_per_tok" in FAMILIES[name]:
        model.set_experts_implementation("eager")  # others have no float64
    return model


def _batch(rows, length=16):
    ids = torch.randint(1, 32, (rows, length + 1), generator=torch.Generator().manual_seed(4))
    return {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}


def _train(model, batch, **told):
    """Run forward and backward; return loss and gradients, None where there is none."""
    positions = {} if "Mamba" in type(model).__name__ else {"position_ids": batch["position_ids"]}
    logits = model(batch["input_ids"], **positions, **told).logits
    loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


def _differences(rows, layout):
    """Return how far each family's loss and gradients are from those of one process."""
    found = {}
    for name in FAMILIES:
        plain, batch = _build(name), _batch(rows)
        model = apply_context_parallel(copy.deepcopy(plain), c10d.group.WORLD, layout=layout)
        whole = batch | {"position_ids": torch.arange(16).expand(rows, 16)}
        expected = _train(plain, whole)
        mine = _train(model, shard_batch(batch, c10d.group.WORLD, layout=layout))
        for value in mine:
            c10d.all_reduce(value)
        found[name] = worst(map(relative_error, mine, expected))
    return found


@pytest.mark.parametrize(("ranks", "rows", "layout"), [(2, 3, "contiguous"), (4, 2, "zigzag")])
def test_states_pass_through_whole_sequences(ranks, rows, layout):
    preload("transformers")
    found = run_ranks(_differences, ranks, rows, layout, timeout=240)[0]
    assert worst(found.values()) <= BOUND, found


def _refused():
    """Return what is said of packed documents, and of an encoder that begins with convolutions."""
    model = apply_context_parallel(_build("Qwen3Next"), c10d.group.WORLD)
    batch = shard_batch(_batch(2), c10d.group.WORLD)
    with pytest.raises(InvalidArgumentError) as packed:
        _train(model, batch, cu_seq_lens_q=torch.tensor([0, 7, 16]))
    sizes = {"d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "num_mel_bins": 8}
    speech = transformers.WhisperConfig(encoder_ffn_dim=16, max_source_positions=16, **sizes)
    encoder = transformers.models.whisper.modeling_whisper.WhisperEncoder(speech)
    with pytest.raises(InvalidArgumentError) as convolved:
        apply_context_parallel(encoder, c10d.group.WORLD)
    return str(packed.value), str(convolved.value)


def test_what_would_pass_a_state_to_others_is_refused():
    preload("transformers")
    for packed, convolved in run_ranks(_refused, 2, timeout=200):
        assert "from one packed document to the next" in packed
        assert "WhisperEncoder takes input_features, and cp divides the positions" in convolved
