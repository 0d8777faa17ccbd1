"""Published runs: layout, machine and measurements.

Options that a source leaves out are assumed, as comments say. A machine's constants are fitted on
rows with `fit`; errors are reported for the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from scaletorch.parallel.pg_manager import Grid
from scaletorch.plan.description import Layout

from .sizes import Program, Sizes
from .trials import FITTED, HEADS, RAMP, SHOWN, Trial


@dataclass(frozen=True, slots=True)
class Row:
    """A published run.

    Attributes:
        table: Key of `SOURCES`.
        sizes: Sizes of the model.
        layout: Layout of the run.
        program: How the model was run.
        machine: Key of `MACHINES`.
        states: Key of `STATES`.
        seconds: Seconds of a step; 0 if not measured.
        gib: GiB of the fullest rank; 0 if not measured.
        fit: Whether the machine's constants were fitted on it.
        note: Remark of its source.
        full: Whether it ran out of memory.
    """

    table: str
    sizes: Sizes
    layout: Layout
    program: Program
    machine: str
    states: str
    seconds: float = 0.0
    gib: float = 0.0
    fit: bool = False
    note: str = ""
    full: bool = False


SOURCES = {
    "A": "Korthikanti et al. 2022, arXiv 2205.05198, table 5; those fitted on are in its abstract",
    "B1": "Narayanan et al. 2021, arXiv 2104.04473, table 1",
    "B2": "Narayanan et al. 2021, arXiv 2104.04473, table 2, PTD-P",
    "B3": "Narayanan et al. 2021, arXiv 2104.04473, table 2, ZeRO-3",
    "B3b": "the same rows, if no communication hides behind computation",
    "M": "Smith et al. 2022, Megatron-Turing NLG 530B, arXiv 2201.11990, section 2.4",
    "D": "Llama 3, arXiv 2407.21783, table 4",
    "G": "BigScience, chronicles-prequel of tr11-176B-ml, February 2022",
    "heads": "BigScience, the same, numbers of heads",
    "ramp": "BigScience, the same, batch size warmup",
}

CORE = Program(scattered=True)
SELECTIVE = Program("selective", scattered=True)
FLASH = Program("fused", dropout=False)
# From February 28th on, the embedding counts as a layer when layers are distributed.
PLACED = Program(scattered=True, placed=True)


def _gpt(name: str, hidden: int, layers: int, heads: int, vocab: int = 51200) -> Sizes:
    return Sizes(name, hidden, layers, heads, vocab, length=2048)


def _layout(
    tp: int, pp: int, dp: int, batch: int, micro: int, *, chunks: int = 1, cp: int = 1,
    recompute: bool = True, sequence: bool = False, zero: int = 0,
) -> Layout:  # fmt: skip
    return Layout(
        Grid(tp=tp, cp=cp, pp=pp, dp=dp), sequence, "full" if recompute else "none", zero,
        "interleaved_1f1b" if chunks > 1 else "1f1b", chunks, "all_gather", micro,
        batch // dp // micro,
    )  # fmt: skip


def _a_seconds(sizes: Sizes, batch: int, ranks: int, share: float) -> float:
    """Return the step time for a printed share of the peak, of the model's operations alone."""
    h, more = sizes.hidden, sizes.length / (6 * sizes.hidden)
    head = sizes.vocab / (12 * sizes.layers * h)
    flops = 72 * batch * sizes.length * sizes.layers * h * h * (1 + more + head)
    return flops / (ranks * share * 312e12)


def _a() -> list[Row]:
    large = _gpt("530B", 20480, 105, 128)
    given = (  # model, pp, chunks, batch, micro, seconds of full and of selective
        (_gpt("22B", 6144, 48, 64), 1, 1, 4, 4, 1.42, 1.10),
        (_gpt("175B", 12288, 96, 96), 8, 3, 64, 1, 18.13, 13.75),
        (large, 35, 3, 280, 1, 49.05, 37.83),
        (_gpt("1T", 25600, 128, 160), 64, 1, 512, 1, 94.42, 71.49),
    )
    fitted = [_a_seconds(large, 2240, 2240, share) for share in (0.421, 0.542)]
    found = []
    for sizes, pp, chunks, batch, micro, full, selective in (
        *given, (large, 35, 3, 2240, 1, fitted[0], fitted[1])
    ):  # fmt: skip
        dp = 8 if batch == 2240 else 1
        for program, seconds in ((CORE, full), (SELECTIVE, selective)):
            less = program is SELECTIVE
            layout = _layout(
                8, pp, dp, batch, micro, chunks=chunks, recompute=not less, sequence=less
            )
            found.append(
                Row("A", sizes, layout, program, "selene 2022", "megatron", seconds, fit=dp > 1)
            )
    return found


def _b_seconds(sizes: Sizes, batch: int, ranks: int, teraflops: float) -> float:
    """Return the step time for a printed rate; the paper's F includes the recomputation."""
    h, more = sizes.hidden, sizes.length / (6 * sizes.hidden)
    head = sizes.vocab / (16 * sizes.layers * h)
    flops = 96 * batch * sizes.length * sizes.layers * h * h * (1 + more + head)
    return flops / (ranks * teraflops * 1e12)


def _b() -> list[Row]:
    # Chunks and micro-batches of table 1 are not printed. Assume 2 chunks, or 3 for 105 layers on
    # 35 ranks, and one row, or 4 without a pipeline. Every second row is used for the fit.
    first = (  # billions, heads, hidden, layers, tp, pp, ranks, batch, TFLOP/s
        (1.7, 24, 2304, 24, 1, 1, 32, 512, 137), (3.6, 32, 3072, 30, 2, 1, 64, 512, 138),
        (7.5, 32, 4096, 36, 4, 1, 128, 512, 142), (18.4, 48, 6144, 40, 8, 1, 256, 1024, 135),
        (39.1, 64, 8192, 48, 8, 2, 512, 1536, 138), (76.1, 80, 10240, 60, 8, 4, 1024, 1792, 140),
        (145.6, 96, 12288, 80, 8, 8, 1536, 2304, 148),
        (310.1, 128, 16384, 96, 8, 16, 1920, 2160, 155),
        (529.6, 128, 20480, 105, 8, 35, 2520, 2520, 163),
        (1008.0, 160, 25600, 128, 8, 64, 3072, 3072, 163),
    )  # fmt: skip
    found = []
    for index, (billions, heads, hidden, layers, tp, pp, ranks, batch, rate) in enumerate(first):
        sizes = _gpt(f"{billions}B", hidden, layers, heads)
        chunks = 1 if pp == 1 else 3 if pp == 35 else 2
        layout = _layout(tp, pp, ranks // tp // pp, batch, 4 if pp == 1 else 1, chunks=chunks)
        seconds = _b_seconds(sizes, batch, ranks, rate)
        found.append(
            Row("B1", sizes, layout, CORE, "selene", "megatron", seconds, fit=index % 2 == 1)
        )
    small, large = _gpt("174.6B", 12288, 96, 96), _gpt("529.6B", 20480, 105, 128)
    second = (  # model, ranks, tp, pp, batch, micro, zero, TFLOP/s
        (small, 384, 8, 12, 1536, 1, 0, 153), (small, 768, 8, 12, 1536, 1, 0, 149),
        (small, 1536, 8, 12, 1536, 1, 0, 141), (large, 560, 8, 35, 2240, 1, 0, 171),
        (large, 1120, 8, 35, 2240, 1, 0, 167), (large, 2240, 8, 35, 2240, 1, 0, 159),
        (small, 384, 1, 1, 1536, 4, 3, 144), (small, 768, 1, 1, 1536, 2, 3, 88),
        (small, 1536, 1, 1, 1536, 1, 3, 44), (large, 640, 1, 1, 2560, 4, 3, 138),
        (large, 1120, 1, 1, 2240, 2, 3, 98), (large, 2240, 1, 1, 2240, 1, 3, 48),
    )  # fmt: skip
    for sizes, ranks, tp, pp, batch, micro, zero, rate in second:
        layout = _layout(tp, pp, ranks // tp // pp, batch, micro, zero=zero)
        seconds = _b_seconds(sizes, batch, ranks, rate)
        ways = ["B2 selene"] if not zero else ["B3 selene", "B3b selene, nothing hides"]
        for way in ways:
            table, _, machine = way.partition(" ")
            found.append(Row(table, sizes, layout, CORE, machine, "megatron", seconds))
    return found


def _m() -> list[Row]:
    sizes = _gpt("MT-NLG 530B", 20480, 105, 128)
    return [
        Row("M", sizes, _layout(8, 35, dp, 1920, 1), CORE, "selene", "megatron", seconds)
        for dp, seconds in ((8, 60.1), (10, 50.2), (12, 44.4))
    ]


def llama_flops(sizes: Sizes, tokens: int) -> float:
    """Return 6 N D plus the causal half of attention."""
    layer = sizes.hidden * (2 * sizes.hidden + 2 * sizes.keys + 3 * sizes.inner)
    parameters = sizes.layers * layer + 2 * sizes.vocab * sizes.hidden
    return 6.0 * tokens * (parameters + sizes.layers * sizes.hidden * sizes.length)


def _d() -> list[Row]:
    given = ((64, 1, 8192, 32, 430), (128, 1, 8192, 16, 400), (8, 16, 131072, 16, 380))
    found = []
    for index, (dp, cp, length, rows, rate) in enumerate(given):
        sizes = Sizes(
            "405B", 16384, 126, 128, 128256, length, kv_heads=8, ffn=53248, gated=True,
            plain=True, tied=False,
        )  # fmt: skip
        # Chunks are not printed: assume 4 of 1 or 2 layers. Gradients are scattered once a step.
        layout = _layout(
            8, 16, dp, rows * dp, 1, chunks=4, cp=cp, recompute=False, sequence=True, zero=1
        )
        flops = llama_flops(sizes, rows * dp * length)
        seconds = flops / (layout.grid.world_size * rate * 1e12)
        found.append(Row("D", sizes, layout, FLASH, "llama", "llama", seconds, fit=index == 0))
    return found


def _g(trials: Sequence[Trial], table: str, *, fit: bool = False) -> list[Row]:
    found = []
    for layers, hidden, heads, dp, tp, pp, micro, batch, gib, seconds, date in trials:
        late = date == "02-28"
        sizes = _gpt(f"{layers} x {hidden}", hidden, layers, heads, vocab=250880)
        layout = _layout(tp, pp, dp, batch, micro, zero=1)
        states = "deepspeed bf16" if late else "deepspeed fp16"
        states += " alone" if dp == 1 else ""
        found.append(
            Row(
                table, sizes, layout, PLACED if late else CORE, "jean zay", states, seconds, gib,
                fit, date, full=not gib and not seconds,
            )
        )  # fmt: skip
    return found


def rows() -> list[Row]:
    """Return all runs, including those of the fit."""
    return [
        *_a(), *_b(), *_m(), *_d(), *_g(SHOWN, "G"), *_g(FITTED, "G", fit=True),
        *_g(HEADS, "heads"), *_g(RAMP, "ramp"),
    ]  # fmt: skip
