"""Several ranks: one error for all, generators, masters of 16-bit parameters, plain weights."""

import copy
import json
import random
import warnings
from unittest.mock import patch

import pytest
import torch
from checkpointed import assert_equal, grid, joined, train
from sweeps import today
from torch import nn

from scaletorch.checkpoint import (
    CheckpointError,
    DamagedCheckpointError,
    export_safetensors,
    import_safetensors,
    latest,
    load,
    save,
    saving,
    weights,
)
from scaletorch.checkpoint.format import safetensors_files
from scaletorch.compose import full_state_dict, parallelize, seed_ranks
from scaletorch.dist import RankPool, all_gather_object, barrier, get_rank
from scaletorch.dist.errors import InvalidArgumentError, MismatchError
from scaletorch.models import Llama, LlamaConfig
from scaletorch.parallel.data_parallel import shard_optimizer
from scaletorch.parallel.pg_manager.building import Scope
from scaletorch.parallel.tensor_parallel.layers import base

SIZES = LlamaConfig(
    vocab_size=30, hidden_size=32, intermediate_size=40, num_layers=4, num_heads=8,
    num_kv_heads=2, tie_embeddings=True,
)  # fmt: skip


@pytest.fixture(scope="module")
def two():
    with RankPool(2, seed=0) as pool:
        yield pool


def setup(layout, seed=3, dtype=torch.float32, optimizer=torch.optim.AdamW, stage=0):
    manager = grid(layout)
    torch.manual_seed(seed)
    model = parallelize(Llama(SIZES).to(dtype), manager, bucket_size=3000, rehearse=False)
    optimizer = optimizer(model.parameters(), lr=1e-2)
    if stage:
        shard_optimizer(optimizer, model, stage=stage)
    return model, optimizer, manager


# Who writes.


def staged(root, layout):
    """Return the bytes that this rank copies for a save in the background, and its weights'."""
    model, _, manager = setup(layout)
    save(root, model, None, manager, step=1, asynchronous=True).wait()
    copied = sum(tensor.nbytes for tensor in saving._buffers[model].values())
    return copied, sum(p.nbytes for p in model.parameters())


def test_replicas_copy_half_of_what_they_hold_alike(two, tmp_path):
    for copied, whole in two.run(staged, tmp_path, (2, 1, 1, 1)):
        assert 0.4 * whole < copied < 0.8 * whole  # generators are each rank's own


# One rank fails.


def fail_on_rank_1(root):
    model, optimizer, _ = setup((1, 1, 1, 2))
    full = OSError(28, "No space left on device") if get_rank() == 1 else None
    with patch.object(
        safetensors_files, "write_tensor", wraps=safetensors_files.write_tensor, side_effect=full
    ):
        for asynchronous in (False, True):
            with pytest.raises(CheckpointError, match=r"failed: rank 1: OSError: .*No space left"):
                save(root, model, optimizer, step=1, asynchronous=asynchronous).wait()
        save(root, model, optimizer, step=1, asynchronous=True)
        with pytest.raises(CheckpointError, match=r"rank 1: OSError: .*No space left"):
            save(root, model, optimizer, step=2)
    assert latest(root) is None
    barrier()
    save(root, model, optimizer, step=1)
    assert latest(root).name == "step-00000001"


def differ(root):
    model, optimizer, _ = setup((1, 1, 1, 2))
    with pytest.raises(MismatchError, match="extra"):
        save(root, model, optimizer, step=1, extra={"position": get_rank()})
    kind = MismatchError if get_rank() else InvalidArgumentError
    with pytest.raises(kind, match="step must be an integer"):
        save(root, model, optimizer, step=1 if get_rank() else None)
    assert latest(root) is None


def meet_damage(root):
    model, optimizer, manager = setup((1, 1, 1, 2))
    train(model, optimizer, manager, 0)
    save(root, model, optimizer, step=1)
    good = copy.deepcopy(model.state_dict())
    train(model, optimizer, manager, 1)
    folder = save(root, model, optimizer, step=2).wait()
    if get_rank() == 0:  # what rank 0 itself does not read
        path = folder / "rank-00001.safetensors"
        path.write_bytes(path.read_bytes()[:-1] + b"\x55")
    train(model, optimizer, manager, 2)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    barrier()
    with pytest.raises(DamagedCheckpointError, match=r"rank 1: .*rank-00001.*checksum"):
        load(folder, model, optimizer)
    assert_equal((model.state_dict(), optimizer.state_dict()), before)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert load(root, model, optimizer).step == 1
    assert ["going back to step 1: step-00000002 is" in str(w.message) for w in caught] == [True]
    assert_equal(model.state_dict(), good)


def export_an_unknown_dtype(root):
    model, _, manager = setup((1, 1, 1, 2))
    (plain,) = (module for module in model.modules() if isinstance(module, Llama))
    plain.register_buffer("odd", torch.zeros(2, dtype=torch.complex128))
    with pytest.raises(CheckpointError, match=r"odd has dtype torch\.complex128, which safeten"):
        export_safetensors(model, root, manager)


@pytest.mark.parametrize("body", [fail_on_rank_1, differ, meet_damage, export_an_unknown_dtype])
def test_an_error_of_one_rank_is_raised_on_all(two, tmp_path, body):
    two.run(body, tmp_path)


# Random generators.


def draws():
    return torch.rand(2).tolist(), random.random()


def generators(root, layout, same):
    model, optimizer, manager = setup(layout)
    if same:
        seed_ranks(7, manager)
        random.seed(get_rank())
        draws()
        save(root, model, optimizer, step=1)
        expected = draws()
    load(root, model, optimizer)
    found = draws()
    load(root, model, optimizer)
    assert draws() == found
    everyone = all_gather_object((manager.tp_rank, found))
    if same:
        assert found == expected
        assert len({str(numbers) for _, (_, numbers) in everyone}) == 4
    return [numbers for _, (numbers, _) in everyone]


def test_generators_go_on_or_are_seeded_anew(four, tmp_path):
    first = four.run(generators, tmp_path, (2, 1, 1, 2), True)[0]
    assert first[0] == first[1] != first[2] == first[3]  # alike over tp
    other = four.run(generators, tmp_path, (1, 2, 1, 2), False)[0]
    assert other[0] == other[1] != other[2] == other[3]
    assert other != first


# Masters.


def masters(model, manager):
    """Return the whole masters, or parameters without any, by plain names."""
    return joined(model, manager, lambda shard: shard.tensor, torch.float32)


def train_on(root, layout, stage, dtype, saves):
    """Save or load; return masters and weights, and the masters after one more step."""
    model, optimizer, manager = setup(layout, 3 if saves else 9, dtype, stage=stage)
    train(model, optimizer, manager, 5)  # if masters are loaded, these are forgotten
    if saves:
        save(root, model, optimizer, step=2)
    else:
        load(root, model, optimizer)
    result = masters(model, manager), full_state_dict(model, manager)
    train(model, optimizer, manager, 2)
    return (*result, masters(model, manager))


def assert_equal_shared(found, expected):
    """Compare what both have, but for the tied one: where stages share it, it has no master."""
    names = (found.keys() & expected.keys()) - {"embed_tokens.weight", "lm_head.weight"}
    assert names
    assert_equal({n: found[n] for n in names}, {n: expected[n].to(found[n].dtype) for n in names})


def refuse_narrow(root):
    model, optimizer, _ = setup((2, 1, 1, 2), dtype=torch.bfloat16)
    with pytest.raises(CheckpointError, match=r"is torch\.float32 in .* torch\.bfloat16"):
        load(root, model, optimizer)


def test_masters_of_16_bit_parameters(four, tmp_path):
    saved, weights, after = four.run(train_on, tmp_path, (2, 1, 1, 2), 1, torch.bfloat16, True)[0]
    assert any(not torch.equal(saved[n], weights[n].float()) for n in saved)
    for layout, stage in [((2, 1, 1, 2), 1), ((1, 2, 2, 1), 2)]:
        found, found_weights, next_one = four.run(
            train_on, tmp_path, layout, stage, torch.bfloat16, False
        )[0]
        assert_equal_shared(found, saved)
        assert_equal(found_weights, weights)
        if layout == (2, 1, 1, 2):
            assert_equal(next_one, after)
    # Parameters of float32 are what the masters were.
    found, wide, _ = four.run(train_on, tmp_path, (1, 2, 1, 2), 1, torch.float32, False)[0]
    assert_equal_shared(found, saved)
    assert_equal_shared(wide, saved)
    # Without masters 16-bit parameters are what they were.
    _, narrow, _ = four.run(train_on, tmp_path, (1, 1, 1, 4), 0, torch.bfloat16, False)[0]
    assert_equal(narrow, weights)


def test_masters_are_made_of_wide_parameters_that_were_saved(four, tmp_path):
    saved, *_ = four.run(train_on, tmp_path, (2, 1, 1, 2), 0, torch.float32, True)[0]
    found, weights, _ = four.run(train_on, tmp_path, (1, 2, 2, 1), 1, torch.bfloat16, False)[0]
    assert_equal_shared(found, saved)
    assert_equal_shared(weights, saved)
    four.run(refuse_narrow, tmp_path)


def factored(root, layout, stage):
    model, optimizer, manager = setup(layout, optimizer=torch.optim.Adafactor, stage=stage)
    if manager.tp_size > 1:
        with pytest.raises(InvalidArgumentError, match=r"Adafactor .*whole_matrices"):
            train(model, optimizer, manager, 0)
        with patch.object(base, "update_scope", return_value=Scope.ELEMENT):  # as if not seen
            train(model, optimizer, manager, 0)
        with pytest.raises(InvalidArgumentError, match=r"optimizer\..*sharded"):
            save(root, model, optimizer, step=1)
        return None
    save(root, model, optimizer, step=1)
    train(model, optimizer, manager, 1)
    expected = full_state_dict(model, manager)
    load(root, model, optimizer)
    train(model, optimizer, manager, 1)
    assert_equal(full_state_dict(model, manager), expected)
    return expected


def test_factored_state_of_whole_parameters(four, tmp_path):
    for layout, stage in [((4, 1, 1, 1), 1), ((1, 2, 2, 1), 0), ((2, 1, 1, 2), 1)]:
        four.run(factored, tmp_path / str(layout), layout, stage)


# Weights alone.


def export(root, layout):
    model, _, manager = setup(layout, seed=4)
    with patch.object(weights, "MAX_FILE", 20_000):
        export_safetensors(model, root, manager)
    with pytest.raises(CheckpointError, match="has weights already"):
        export_safetensors(model, root)
    return full_state_dict(model, manager)


def take_in(root, layout, dtype=torch.float32, stage=0):
    model, optimizer, manager = setup(layout, seed=9, dtype=dtype, stage=stage)
    train(model, optimizer, manager, 0)
    import_safetensors(model, root, manager)
    weights = full_state_dict(model, manager)
    result = weights, masters(model, manager)
    optimizer.step()  # without new gradients, but no master may come back from before
    return result


def test_weights_go_out_and_come_in(four, tmp_path):
    expected = four.run(export, tmp_path / "many", (1, 2, 1, 2))[0]
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(expected) - {"lm_head.weight"}
    files = sorted(path.name for path in (tmp_path / "many").glob("*.safetensors"))
    assert sorted(set(index["weight_map"].values())) == files
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert all((tmp_path / "many" / f).stat().st_size < 25_000 for f in files)
    weights, _ = four.run(take_in, tmp_path / "many", (2, 1, 1, 2))[0]
    assert_equal(weights, expected)
    weights, wide = four.run(take_in, tmp_path / "many", (1, 2, 2, 1), torch.bfloat16, 1)[0]
    assert_equal_shared(wide, expected)
    assert_equal_shared(weights, expected)
    plain = Llama(SIZES)
    import_safetensors(plain, tmp_path / "many")
    assert_equal(dict(plain.state_dict()), expected)
    export_safetensors(plain, tmp_path / "one")
    assert [path.name for path in (tmp_path / "one").iterdir()] == ["model.safetensors"]
    safetensors = pytest.importorskip("safetensors.torch")
    found = safetensors.load_file(tmp_path / "one" / "model.safetensors")
    assert_equal(found | {"lm_head.weight": found["embed_tokens.weight"]}, expected)


def test_other_weights_are_refused(tmp_path):
    with pytest.raises(DamagedCheckpointError, match="has neither"):
        import_safetensors(Llama(SIZES), tmp_path)
    export_safetensors(nn.Linear(3, 2), tmp_path / "linear")
    with pytest.raises(CheckpointError, match=r"the model has no bias, weight; the checkpoint has"):
        import_safetensors(Llama(SIZES), tmp_path / "linear")
    with pytest.raises(CheckpointError, match=r"shape \(2, 3\) in the checkpoint and \(2, 4\)"):
        import_safetensors(nn.Linear(4, 2), tmp_path / "linear")
    (tmp_path / "linear" / "model.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(DamagedCheckpointError, match="cannot be read as safetensors"):
        import_safetensors(nn.Linear(3, 2), tmp_path / "linear")
    (tmp_path / "index").mkdir()
    index = tmp_path / "index" / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"weight": "../linear/model.safetensors"}}')
    with pytest.raises(DamagedCheckpointError, match="not in the folder"):
        import_safetensors(nn.Linear(3, 2), tmp_path / "index")


# transformers.


def transformers_llama(tied):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=4, tie_word_embeddings=tied, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(1)
    return transformers.LlamaForCausalLM(config)


def export_transformers(root, tied):
    manager = grid((1, 2, 1, 2))
    model = parallelize(transformers_llama(tied), manager, rehearse=False)
    export_safetensors(model, root, manager)
    for parameter in model.parameters():
        parameter.data.zero_()
    import_safetensors(model, root, manager)
    return full_state_dict(model, manager)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("tied", today([False, True], 2))
def test_transformers_reads_what_is_exported(four, tmp_path, tied):
    plain = transformers_llama(tied)
    again = four.run(export_transformers, tmp_path, tied, timeout=200)[0]
    assert_equal(again, dict(plain.state_dict()))
    plain.config.save_pretrained(tmp_path)
    found, report = type(plain).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert_equal(dict(found.state_dict()), dict(plain.state_dict()))
