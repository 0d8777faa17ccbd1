"""``hatch run sound``: does bisect report nothing on runs that are right, and see nearly all?"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from mutants.specimen import PLAN, Staged, batch
from torch import nn

from scaletorch.bisect import Report
from scaletorch.bisect.locate import locate, prepare
from scaletorch.dist.building import locate as locator
from scaletorch.dist.errors import RankFailedError
from scaletorch.dist.testing import preload
from scaletorch.verify import parse_layout
from scaletorch.verify.cases import KNOWN_DTYPES, Case
from scaletorch.verify.problem import (
    TORCH_DTYPES,
    BatchFn,
    ModelFn,
    Subject,
    default_batch,
    default_mixture,
    default_model,
    sharpened,
)
from scaletorch.verify.verify import reused_ranks

STEPS = 2
ON: Mapping[str, Any] = {"sequence_parallel": "on"}
# DPxPPxCPxTP and options, of each family without experts.
LAYOUTS: Sequence[tuple[str, Mapping[str, Any]]] = [
    ("2x1x1x1", {}),
    ("2x1x1x1", {"data_parallel": "zero2", "micro_batches": 1}),
    ("1x2x1x1", {}),
    ("1x2x1x1", {"schedule": "zb_h1", "recompute": "layers"}),
    ("1x2x1x1", {"schedule": "interleaved_1f1b"}),
    ("1x2x1x1", {"schedule": "dualpipe_v", "micro_batches": 4}),
    ("1x1x2x1", {}),
    ("1x1x2x1", {"cp_layout": "contiguous", "micro_batches": 1}),
    ("1x1x2x1", {"cp_method": "ulysses", "recompute": "selective"}),
    ("1x1x1x2", {}),
    ("1x1x1x2", ON),
    ("1x1x1x2", {"loss_parallel": "on", "micro_batches": 1}),
    ("1x1x2x2", ON),
    ("1x1x2x2", {"cp_layout": "stripe", "cp_method": "all_gather"}),
    ("1x2x1x2", {"loss_parallel": "on", "schedule": "zb_h1"}),
    ("1x2x2x1", {"schedule": "interleaved_1f1b", "cp_layout": "contiguous"}),
    ("2x1x1x2", {"data_parallel": "zero1", "loss_parallel": "on", **ON}),
    ("2x1x2x1", {"data_parallel": "float64", "recompute": "layers"}),
    ("2x2x1x1", {"data_parallel": "zero2"}),
    ("1x4x1x1", {"micro_batches": 4}),
]
# Of those with experts.
EXPERTS: Sequence[tuple[str, Mapping[str, Any]]] = [
    ("2x1x1x1-ep2", {}),
    ("2x1x1x1-ep2", {"data_parallel": "zero2", "micro_batches": 1}),
    ("2x1x1x1", {}),
    ("1x2x1x1", {"schedule": "zb_h1"}),
    ("1x2x1x1", {"schedule": "dualpipe_v", "micro_batches": 4}),
    ("1x1x2x1", {"cp_layout": "contiguous"}),
    ("1x1x2x1-ep2", {}),
    ("1x1x2x1-ep2", {"cp_method": "ulysses", "micro_batches": 1}),
    ("1x1x1x2", {}),
    ("1x1x1x2", ON),
    ("1x1x1x2-ep2", {}),
    ("1x1x1x2-ep2", {**ON, "recompute": "layers"}),
    ("2x1x1x2-ep2-etp2", {}),
    ("2x1x1x2-ep2", {**ON, "loss_parallel": "on"}),
    ("2x1x1x2-ep4", {"data_parallel": "zero1"}),
    ("2x1x2x1-ep4", {}),
    ("2x1x2x1-ep2", {"recompute": "selective"}),
    ("2x2x1x1-ep2", {"schedule": "interleaved_1f1b"}),
    ("1x2x1x2-ep2", ON),
    ("4x1x1x1-ep2", {"data_parallel": "float64"}),
]
# The specimen looks at ids where hidden states are shares of a sequence: other options instead.
OFF: Mapping[str, Any] = {"sequence_parallel": "off", "recompute": "layers"}
ALONE = [(grid, {**own, **OFF} if ON.items() <= own.items() else own) for grid, own in LAYOUTS]


def of_transformers(name: str, **sizes: Any) -> nn.Module:
    """Return a small model of transformers."""
    import transformers

    config = getattr(transformers, f"{name}Config")(vocab_size=64, use_cache=False, **sizes)
    return sharpened(transformers.AutoModelForCausalLM.from_config(config))


def gemma() -> nn.Module:
    """Return a small Gemma-2: soft caps, a window in every other layer, four norms a layer."""
    return of_transformers(
        "Gemma2", hidden_size=32, intermediate_size=48, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, query_pre_attn_scalar=8,
        sliding_window=9, max_position_embeddings=64,
    )  # fmt: skip


def gpt2() -> nn.Module:
    """Return a small GPT-2: queries, keys and values are one matrix, positions are learnt."""
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return of_transformers("GPT2", n_embd=32, n_layer=4, n_head=4, n_positions=64, **no_dropout)


class Family(NamedTuple):
    """What is trained, and on which layouts."""

    model_fn: ModelFn
    batch_fn: BatchFn = default_batch
    plan: Mapping[str, Any] | None = None
    layouts: Sequence[tuple[str, Mapping[str, Any]]] = LAYOUTS


FAMILIES: Mapping[str, Family] = {
    "llama": Family(default_model),
    "mixture": Family(default_mixture, layouts=EXPERTS),
    "specimen": Family(Staged, batch, PLAN, ALONE),
    "gemma2": Family(gemma),
    "gpt2": Family(gpt2),
}


class Ran(NamedTuple):
    """A case and what came of it; a text if it failed."""

    family: str
    case: Case
    report: Report | str
    seconds: float

    @property
    def sound(self) -> bool:
        """Whether it ran and nothing was reported."""
        return not isinstance(self.report, str) and self.report.sound


def campaign(
    families: Sequence[str],
    dtypes: Sequence[str],
    only: Sequence[int] = (),
    *,
    steps: int = STEPS,
    timeout: float = 120.0,
) -> Iterator[Ran]:
    """Run and compare cases, those of one family and number of ranks one after another.

    `only` has numbers of layouts, of 20; all by default.
    """
    preload("torch._dynamo")
    place = tempfile.TemporaryDirectory(prefix="scaletorch-sound-")
    with place as name, reused_ranks(timeout) as pool_of:
        for family, dtype in product(families, dtypes):
            model_fn, batch_fn, plan, layouts = FAMILIES[family]
            folder, subject = Path(name, f"{family}-{dtype}"), Subject(locator(model_fn), plan)
            prepared = prepare(folder, subject, batch_fn, dtype, steps)
            chosen = [layouts[number] for number in only or range(len(layouts))]
            cases = [Case(parse_layout(grid), dtype, **options) for grid, options in chosen]
            for case in sorted(cases, key=lambda each: each.grid.world_size):
                pool, began = pool_of(case.grid.world_size), time.monotonic()
                report: Report | str
                try:
                    report = locate(case, subject, prepared, pool, folder / "layout")
                except RankFailedError as error:
                    report = str(error)
                yield Ran(family, case, report, time.monotonic() - began)
                shutil.rmtree(folder / "layout", ignore_errors=True)
            shutil.rmtree(folder)


def main() -> int:
    """Run the command; 1 if a sound run is reported, or one fails."""
    parser = argparse.ArgumentParser("hatch run sound", description=__doc__)
    parser.add_argument("--family", nargs="+", choices=[*FAMILIES], default=[*FAMILIES])
    parser.add_argument("--dtype", nargs="+", choices=KNOWN_DTYPES, default=[*TORCH_DTYPES])
    parser.add_argument("--only", nargs="+", type=int, default=(), help="layouts, 0 to 19")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for one case")
    given = parser.parse_args()
    every = []
    for ran in campaign(given.family, given.dtype, given.only, timeout=given.timeout):
        every.append(ran)
        verdict = "sound" if ran.sound else f"REPORT\n{ran.report}"
        print(f"{ran.family:9} {ran.case!s:70} {ran.seconds:.1f} s {verdict}", flush=True)
    wrong = sum(not ran.sound for ran in every)
    print(f"\n{table(every)}\n{len(every)} sound runs, {wrong} reports")
    return int(wrong > 0)


def table(every: Sequence[Ran]) -> str:
    """Return, by family and dtype, how many ran, were reported, and how much was compared."""
    titles = "family", "dtype", "runs", "reports", "tensors compared", "not compared", "s"
    rows: list[Sequence[object]] = [titles, ["---"] * len(titles)]
    for family, dtype in dict.fromkeys((ran.family, ran.case.dtype) for ran in every):
        own = [ran for ran in every if (ran.family, ran.case.dtype) == (family, dtype)]
        reports = [ran.report for ran in own if not isinstance(ran.report, str)]
        unseen = sum(report.count("unseen") for report in reports)
        compared = sum(len(report.judged) for report in reports) - unseen
        wrong, seconds = sum(not ran.sound for ran in own), round(sum(ran.seconds for ran in own))
        rows.append([family, dtype, len(own), wrong, compared, unseen, seconds])
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in rows)


if __name__ == "__main__":
    sys.exit(main())
