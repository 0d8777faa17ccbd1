"""After training: text is drawn, the loss measured, and transformers reads what is exported."""

import json
import math
from dataclasses import replace

import pytest
import torch
from pretrained import MODEL, settings, tokenizer_of_words

from scaletorch.checkpoint import CheckpointError, DamagedCheckpointError, save
from scaletorch.dist.errors import InvalidArgumentError
from scaletorch.pretrain import train
from scaletorch.pretrain.__main__ import main
from scaletorch.pretrain.commands import byte_letters, export
from scaletorch.pretrain.saved import evaluate, generate, load_trained


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    config = settings(
        tmp_path_factory.mktemp("trained"), steps=40, batch_size=8, micro_batches=1, seq_len=32,
        lr=1e-2, save_every=40,
    )  # fmt: skip
    config.data[0].write_text("the quick brown fox\n" * 100)
    return config, train(config)


def test_what_is_drawn_is_like_the_text(run):
    config, _ = run
    trained = load_trained(config.out)
    assert trained.step == 40
    text = generate(trained, "the quick ", tokens=60, temperature=0)
    assert text.startswith("the quick ")
    assert set(text.split()[:-1]) <= {"the", "quick", "brown", "fox"}
    before = torch.get_rng_state()
    first, again, other = (
        generate(trained, "the ", tokens=30, temperature=3.0, seed=seed) for seed in (1, 1, 2)
    )
    assert first == again != other
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": ""}, "a prompt needs at least one token"),
        ({"tokens": 0}, "tokens must be at least 1"),
        ({"temperature": math.nan}, "temperature at least 0"),
    ],
)
def test_what_cannot_be_drawn(run, options, message):
    options = {"prompt": "a", "tokens": 1} | options
    with pytest.raises(InvalidArgumentError, match=message):
        generate(load_trained(run[0].out), **options)


def test_the_loss_is_that_of_training(run, tmp_path):
    config, losses = run
    trained = load_trained(config.out)
    found = evaluate(trained, config.data, sequences=20)
    assert found.seen
    assert found.loss == pytest.approx(losses[-1], abs=0.1)
    assert "perplexity" in str(found)
    other = tmp_path / "other.txt"
    other.write_text("zebras jump 1234567890 " * 30)
    worse = evaluate(trained, (other,), sequences=4)
    assert not worse.seen
    assert worse.loss > found.loss + 1
    assert worse.tokens == 4 * config.seq_len
    with pytest.raises(InvalidArgumentError, match="sequences must be at least 1"):
        evaluate(trained, (other,), sequences=0)


def test_transformers_reads_what_is_exported(run, tmp_path):
    transformers = pytest.importorskip("transformers")
    config, _ = run
    trained = load_trained(config.out)
    export(trained, tmp_path / "hf")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    text = "the quick brown fox é 中文 \x00\n"
    ids = tokenizer(text)["input_ids"]
    assert ids == list(text.encode()) == trained.encode(text).tolist()
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
    assert generate(trained, "the quick", tokens=2).startswith("the quick")
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


def test_the_commands(run, tmp_path, capsys):
    config, _ = run
    out = str(config.out)
    assert main(["sample", out, "--prompt", "the ", "--tokens", "20", "--temperature", "0"]) == 0
    assert "quick" in capsys.readouterr().out
    assert main(["eval", out, "--data", str(config.data[0])]) == 0
    assert "the text that it was trained on" in capsys.readouterr().out
    assert main(["export", out, str(tmp_path / "hf")]) == 0
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["model_type"] == "llama"
    capsys.readouterr()
    (tmp_path / "empty").mkdir()
    assert main(["sample", str(tmp_path / "empty")]) == 2
    text = capsys.readouterr().err
    assert text.startswith("InvalidArgumentError: ")
    assert text.endswith("has no checkpoint: train with --out and --save-every\n")
    for foreign in (tmp_path / "hf", tmp_path):
        assert main(["sample", str(foreign)]) == 2
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
