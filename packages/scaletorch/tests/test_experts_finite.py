"""Gradients of experts that are not finite are refused on every rank, whoever has the experts."""

import pytest
import torch
from small_models import small_mixture
from training import tokens

from scaletorch import compose
from scaletorch.dist import NonFiniteError, get_rank
from scaletorch.dist.testing import relative_error, run_ranks
from scaletorch.parallel.pg_manager import (
    destroy_process_group_manager,
    setup_process_group_manager,
)

CHECKED = {"check_finite": True}


def built():
    torch.manual_seed(2)
    return small_mixture().double()


def refused(sizes, guilty, name):
    manager = setup_process_group_manager(**sizes)
    try:
        whole, plain = tokens(rows=8), built()
        logits = plain(whole["input_ids"]).flatten(0, 1)
        torch.nn.functional.cross_entropy(logits, whole["labels"].flatten()).backward()
        model = compose.parallelize(built(), manager, data_parallel=CHECKED, rehearse=False)
        some = compose.shard_global_batch(whole, 2, model=model)
        named = {n: p for n, p in model.named_parameters() if n.endswith(name)}
        handles = [p.register_hook(lambda g: g / 0) for p in named.values() if get_rank() == guilty]
        with pytest.raises(NonFiniteError) as caught:
            compose.train_step(model, some)
        assert all(p.grad is None for p in model.parameters())
        for handle in handles:
            handle.remove()
        compose.train_step(model, some)
        found = compose.full_gradients(model)
        for each, parameter in plain.named_parameters():
            assert relative_error(found[each], parameter.grad) < 1e-11, each
        return str(caught.value)
    finally:
        destroy_process_group_manager()


LAYOUTS = [
    ({"dp_size": 4, "ep_size": 2}, 1, "experts.down_proj"),
    ({"dp_size": 2, "pp_size": 2, "ep_size": 2}, 3, "experts.down_proj"),
    ({"dp_size": 2, "tp_size": 2, "ep_size": 2}, 2, "experts.gate_up_proj"),
    ({"tp_size": 2, "pp_size": 2}, 1, "q_proj.weight"),
]


@pytest.mark.parametrize(("sizes", "guilty", "name"), LAYOUTS)
def test_every_rank_hears(sizes, guilty, name):
    texts = run_ranks(refused, 4, sizes, guilty, name)
    assert all(f"{name} on dp" in text and "all are None now" in text for text in texts)
    heard = [text for text in texts if "gradients of other ranks are not finite" in text]
    assert 0 < len(heard) < 4
    assert "gradients of other ranks" not in texts[guilty]
