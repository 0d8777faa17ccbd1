"""After training: transformers reads what is exported."""

import json
from dataclasses import replace

import pytest
import torch
from pretrained import MODEL, settings, tokenizer_of_words

from scaletorch.checkpoint import CheckpointError, DamagedCheckpointError, save
from scaletorch.dist.errors import InvalidArgumentError
from scaletorch.pretrain import train
from scaletorch.pretrain.__main__ import main
from scaletorch.pretrain.export import byte_letters, export, load_trained


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    config = settings(tmp_path_factory.mktemp("trained"), steps=2, save_every=2)
    train(config)
    return config


def test_transformers_reads_what_is_exported(run, tmp_path):
    transformers = pytest.importorskip("transformers")
    trained = load_trained(run.out)
    export(trained, tmp_path / "hf")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    text = "the quick brown fox é 中文 \x00\n"
    ids = tokenizer(text)["input_ids"]
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text
    tokens = torch.tensor([ids])
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).logits, trained.model(tokens))
    with pytest.raises(CheckpointError, match="has weights already"):
        export(trained, tmp_path / "hf")


def test_letters_of_bytes_are_gpt2s():
    letters = byte_letters()
    assert sorted(letters.values()) == list(range(256))
    assert (letters["A"], letters["Ġ"], letters["Ċ"]) == (65, 32, 10)


def test_another_tokenizer_tied_embeddings_and_float64(tmp_path):
    transformers = pytest.importorskip("transformers")
    file = tokenizer_of_words(tmp_path / "words.json")
    config = settings(
        tmp_path, tokenizer=file, steps=2, save_every=2, dtype="float64",
        model=replace(MODEL, tie_embeddings=True),
    )  # fmt: skip
    train(config)
    trained = load_trained(config.out)
    assert trained.model.config.vocab_size == 6
    export(trained, tmp_path / "hf")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype="auto")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    tokens = torch.tensor([tokenizer("the quick brown fox")["input_ids"]])
    assert tokens.tolist() == [[1, 2, 3, 4]]
    assert model.dtype == torch.float64
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).logits, trained.model(tokens))
    file.unlink()
    with pytest.raises(InvalidArgumentError, match=r"tokenizer .*words.json is not a file"):
        load_trained(config.out)
    moved = tokenizer_of_words(tmp_path / "moved.json")
    assert load_trained(config.out, moved).tokenizer == moved


def test_the_command(run, tmp_path, capsys):
    assert main(["export", str(run.out), str(tmp_path / "hf")]) == 0
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["model_type"] == "llama"
    capsys.readouterr()
    (tmp_path / "empty").mkdir()
    assert main(["export", str(tmp_path / "empty"), str(tmp_path / "to")]) == 2
    text = capsys.readouterr().err
    assert text.startswith("InvalidArgumentError: ")
    assert text.endswith("has no checkpoint: train with --out and --save-every\n")
    for foreign in (tmp_path / "hf", tmp_path):
        assert main(["export", str(foreign), str(tmp_path / "to")]) == 2
        text = capsys.readouterr().err
        assert text.startswith(f"CheckpointError: {foreign} has no checkpoint ")
        assert "import_safetensors" in text


def test_checkpoints_of_other_programs_and_damaged_ones(tmp_path):
    save(tmp_path, torch.nn.Linear(2, 2), step=1)
    with pytest.raises(CheckpointError, match="was not saved by this command"):
        load_trained(tmp_path)
    (tmp_path / "step-00000001" / "metadata.json").write_text("{}")
    with pytest.raises(DamagedCheckpointError, match="not of a checkpoint"):
        load_trained(tmp_path)
