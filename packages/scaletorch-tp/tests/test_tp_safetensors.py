"""Checkpoints in safetensors: each rank reads its part of every kind of shard, and no more."""

import json
import sys

import pytest
import torch
from gpts import EVERY_SHARD
from gpts import EveryShard as Net
from torch import nn
from torch.distributed import get_rank, group

from scaletorch.dist.testing import preload, run_ranks
from scaletorch.parallel.tensor_parallel import (
    apply_tensor_parallel,
    gather_state_dict,
    load_safetensors,
)

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def whole_state():
    return dict(Net().state_dict())


def write(folder, state, files=1):
    save_file = pytest.importorskip("safetensors.torch").save_file
    folder.mkdir(exist_ok=True)
    state = {name: tensor.clone() for name, tensor in state.items()}
    if files == 1:
        save_file(state, folder / WHOLE)
        return
    names = list(state)
    weights = {}
    for n in range(files):
        file = f"model-{n + 1:05}-of-{files:05}.safetensors"
        save_file({name: state[name] for name in names[n::files]}, folder / file)
        weights |= dict.fromkeys(names[n::files], file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weights}))


def sharded(on_meta=False):
    if not on_meta:
        return apply_tensor_parallel(Net(), EVERY_SHARD, group.WORLD)
    with torch.device("meta"):
        model = Net()
    model = apply_tensor_parallel(model, EVERY_SHARD, group.WORLD).to_empty(device="cpu")
    model.tie()
    return model


def watch(sizes):
    """Note the size of everything that is read."""
    import safetensors

    class Slice:
        def __init__(self, inner):
            self.inner, self.get_shape = inner, inner.get_shape

        def __getitem__(self, index):
            found = self.inner[index]
            sizes.append(found.numel() * found.element_size())
            return found

    class File:
        def __init__(self, *args, **options):
            self.context = real(*args, **options)

        def __enter__(self):
            self.inner = self.context.__enter__()
            self.keys = self.inner.keys  # and no get_tensor
            return self

        def __exit__(self, *error):
            return self.context.__exit__(*error)

        def get_slice(self, name):
            return Slice(self.inner.get_slice(name))

    real, safetensors.safe_open = safetensors.safe_open, File
    return lambda: setattr(safetensors, "safe_open", real)


def load(folder, on_meta):
    model, sizes = sharded(on_meta), []
    stop = watch(sizes)
    try:
        load_safetensors(model, folder)
    finally:
        stop()
    whole, expected = gather_state_dict(model), whole_state()
    assert model.head.weight is model.embed.weight
    assert list(whole) == list(expected)
    assert all(torch.equal(whole[name], expected[name]) for name in expected)
    tied = {id(t): t for t in model.state_dict(keep_vars=True).values()}.values()
    own = [t.numel() * t.element_size() for t in tied]
    return sum(sizes), max(sizes), sum(own), max(own)


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
@pytest.mark.parametrize("files", [1, 3])
def test_each_rank_reads_its_own_part_alone(tmp_path, tp, files):
    state = whole_state()
    del state["head.weight"]  # as transformers leaves out what is tied
    write(tmp_path, state, files)
    for read, largest_read, own, largest in run_ranks(load, tp, tmp_path, on_meta=files == 3):
        assert read == own
        assert largest_read <= largest


def test_both_names_of_a_tie_and_another_dtype_are_taken(tmp_path):
    state = whole_state()
    write(tmp_path, {n: t.double() if t.is_floating_point() else t for n, t in state.items()})
    model = apply_tensor_parallel(Net(), EVERY_SHARD)
    load_safetensors(model, str(tmp_path))
    assert all(torch.equal(t, state[n]) for n, t in model.state_dict().items())
    assert model.head.weight.dtype == torch.float32


def mistakes(folder):
    model = sharded()
    before = gather_state_dict(model)
    for name, text in (
        ("lacking", r"lacks these of the model .*down.weight, norm.running_mean"),
        ("unknown", r"the model has no tensor for these of .*: else.weight, more"),
        ("misshapen", r"'down.weight' has shape \(7, 10\) in the file, but \(10, 7\) in the plain"),
        ("none", r"none has neither model.safetensors nor model.safetensors.index.json"),
        ("broken", r"broken.model.safetensors cannot be read as safetensors"),
        ("index", r"index.json has no weight_map of names and files"),
        ("gone", r"gone.model-00002-of-00002.safetensors cannot be read as safetensors"),
        ("lying", r"the index places in .*-00001-of-00002.safetensors what it lacks: nothing"),
    ):
        with pytest.raises(ValueError, match=rf"^rank {get_rank()}.*: .*{text}"):
            load_safetensors(model, folder / name)
    with torch.device("meta"):
        empty = apply_tensor_parallel(Net(), EVERY_SHARD, group.WORLD)
    with pytest.raises(ValueError, match=r"call model.to_empty\(device=...\) first: attention.k_"):
        load_safetensors(empty, folder / "right")
    after = gather_state_dict(model)
    assert all(torch.equal(after[name], before[name]) for name in before)
    load_safetensors(model, folder / "lacking", strict=False)
    load_safetensors(model, folder / "unknown", strict=False)
    after = gather_state_dict(model)
    assert all(torch.equal(after[name], tensor) for name, tensor in whole_state().items())


def test_mistakes_are_named_and_load_nothing(tmp_path):
    state = whole_state()
    write(tmp_path / "right", state)
    left_out = ("down.weight", "norm.running_mean")
    write(tmp_path / "lacking", {n: t for n, t in state.items() if n not in left_out})
    write(tmp_path / "unknown", state | {"else.weight": torch.ones(1), "more": torch.ones(1)})
    write(tmp_path / "misshapen", state | {"down.weight": torch.ones(7, 10)})
    for name in ("none", "broken", "index"):
        (tmp_path / name).mkdir()
    (tmp_path / "broken" / WHOLE).write_bytes(b"\x08\0\0\0\0\0\0\0nonsense")
    (tmp_path / "index" / INDEX).write_text('{"weight_map": ["a"]}')
    write(tmp_path / "gone", state, 2)
    (tmp_path / "gone" / "model-00002-of-00002.safetensors").unlink()
    write(tmp_path / "lying", state, 2)
    index = tmp_path / "lying" / INDEX
    weights = json.loads(index.read_text())["weight_map"]
    weights["nothing"] = weights["down.weight"].replace("2-of", "1-of")
    index.write_text(json.dumps({"weight_map": weights}))
    run_ranks(mistakes, 2, tmp_path)


def llama():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 53, "hidden_size": 24, "intermediate_size": 37, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(
        **sizes, num_attention_heads=6, num_key_value_heads=2, tie_word_embeddings=True
    )
    return transformers.LlamaForCausalLM(config)


def load_llama(folder):
    with torch.device("meta"):
        model = llama()
    apply_tensor_parallel(model, group=group.WORLD).to_empty(device="cpu")
    model.tie_weights()
    load_safetensors(model, folder)
    whole, expected = gather_state_dict(model), llama().state_dict()
    assert all(torch.equal(whole.pop(name), tensor) for name, tensor in expected.items())
    assert not whole


def test_what_transformers_saved_is_loaded_onto_empty_memory(tmp_path):
    llama().save_pretrained(tmp_path, max_shard_size="10KB")
    assert (tmp_path / INDEX).is_file()
    preload("transformers.models.llama.modeling_llama")  # 1.3 s of a rank
    run_ranks(load_llama, 4, tmp_path)


def test_without_the_library_its_extra_is_named(tmp_path, monkeypatch):
    (tmp_path / WHOLE).touch()
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(RuntimeError, match=r"pip install scaletorch-tp\[safetensors\]"):
        load_safetensors(nn.Linear(1, 1), tmp_path)
