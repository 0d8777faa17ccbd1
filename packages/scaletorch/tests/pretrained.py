"""A small pre-training run of one process, and a tokenizer of a few words."""

from scaletorch.models import LlamaConfig
from scaletorch.pretrain import PretrainConfig

MODEL = LlamaConfig(hidden_size=32, intermediate_size=64, num_layers=2, num_heads=4, num_kv_heads=2)
FOX = "the quick brown fox jumps over the lazy dog\n"


def settings(folder, **changes):
    """Return settings of four steps on a text in a folder; the run's own is beside it."""
    text = folder / "text.txt"
    text.write_text(FOX * 20)
    given = {
        "model": MODEL, "steps": 4, "batch_size": 4, "micro_batches": 2, "seq_len": 16,
        "warmup_steps": 2, "data": (text,), "out": folder / "run",
    }  # fmt: skip
    return PretrainConfig(**given | changes)


def tokenizer_of_words(path):
    """Write a tokenizer of six tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    known = {"[UNK]": 0, "the": 1, "quick": 2, "brown": 3, "fox": 4, "document": 5}
    tokenizer = Tokenizer(models.WordLevel(known, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(path))
    return path
