"""The command line's arguments, and the cluster, options and cuts that they select."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..dist.errors import InvalidArgumentError
from ..parallel.pipeline_parallel import SCHEDULES
from .clusters import CLUSTERS, Cluster, Link, cluster_named, device_named
from .description import Cut
from .files import read_cluster
from .layout import CHUNKS
from .options import Options
from .units import BYTES, BYTES_A_SECOND, SECONDS, quantity

DEFAULT = "dgx-a100"
OTHERS = "The model was described with kernels of {}, and these devices run those of {}."
ASSUMED = f"No --device and no --cluster: figures are those of {DEFAULT} nodes."
AXES = ("dp", "pp", "cp", "tp", "ep")
EPILOG = """\
Options that restrict layouts take one or more values: --tp 4 8 --recompute none full.
Exit status: 0 a layout fits, 1 none does, 2 what is asked for cannot be planned."""


def subcommand(given: Sequence[str]) -> tuple[str, Any]:
    """Return the name of the subcommand and its parsed arguments."""
    prog, parsers = f"python -m {__package__}", {"describe": _describing, "calibrate": _calibrating}
    if given and (parser := parsers.get(given[0])):
        return given[0], parser(f"{prog} {given[0]}").parse_args(given[1:])
    return "plan", _planning(prog).parse_args(given)


def _planning(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog, description="Which layout to train with: how much memory, how long.",
        epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    say = parser.add_argument
    say("--description", type=Path, metavar="FILE", help="as `describe` wrote it; for --model")
    say("--ranks", type=_count, required=True, metavar="N", help="how many devices")
    say("--rows", type=_count, required=True, metavar="N", help="sequences of a global batch")
    say("--memory", metavar="SIZE", help="of a device, such as 80GiB; else as the device has")
    say("--device", metavar="NAME", help="of the table, such as H100-SXM")
    files = f"as `calibrate` or you wrote it, or one of {', '.join(CLUSTERS)}"
    say("--cluster", metavar="FILE", help=files)
    links = "for --device, the innermost first, such as 8:3us:300GB/s 64:8us:25GB/s"
    say("--link", nargs="+", default=[], metavar="RANKS:LATENCY:BANDWIDTH", help=links)
    _model(parser, AXES)
    say("--micro-rows", type=_count, nargs="+", metavar="N", help="rows of a micro-batch")
    say("--zero", type=int, nargs="+", choices=range(4), help="stages of ZeRO")
    say("--schedule", nargs="+", choices=[name for name in SCHEDULES if name != "forward_only"])
    say("--top", type=_count, default=10, metavar="N", help="layouts in the table (10)")
    say("--explain", metavar="LAYOUT", help="show one in full: DPxPPxCPxTP, as 2x4x1x8")
    for name in ("json", "html"):
        say(f"--{name}", type=Path, metavar="FILE", help=f"write the plan as {name.upper()}")
    return parser


def _describing(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog, description="Write what plans need to know of a model to a file."
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--ranks", type=_count, default=64, metavar="N", help="at most (64)")
    parser.add_argument("--kernels", default="cuda", choices=("cuda", "cpu"), help="whose (cuda)")
    _model(parser, ("tp", "cp", "ep"))
    return parser


def _calibrating(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog, description="Measure this machine, for --cluster.")
    parser.add_argument("--ranks", type=_count, default=2, metavar="N", help="that will train (2)")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--backend", default="gloo", help="of the ranks (gloo)")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    return parser


def _model(parser: argparse.ArgumentParser, axes: Sequence[str]) -> None:
    """Add the options that name a model and the cuts to describe."""
    say = parser.add_argument
    say("--model", help="folder with a config.json of transformers, or package.module:function")
    say("--length", type=_count, metavar="N", help="tokens of a sequence")
    say("--dtype", help="of parameters, such as bfloat16; else as the model is built")
    say("--batch", help="package.module:function of rows, what `train_step` takes of a model")
    say("--loss", help="package.module:function of an output and a micro-batch, its loss_fn")
    say("--row-dims", nargs="+", default=[], help="dims of rows, such as pixels=1 table=None")
    say("--sequence-dims", nargs="+", default=[], help="dims of positions, such as latents=1")
    say("--plan", help="package.module:name of a tensor parallel plan")
    say("--split", help="package.module:name of a Split, if the layers are not one nn.ModuleList")
    for axis in axes:
        say(f"--{axis}", type=_count, nargs="+", metavar="N", help="these sizes alone")
    say("--recompute", nargs="+", choices=("none", "selective", "full", "offload"))
    say("--sequence-parallel", nargs="+", choices=("off", "on"))
    say("--cp-method", dest="cp_methods", nargs="+", metavar="NAME", help="as for `parallelize`")


def _count(text: str) -> int:
    try:
        count = int(text)
    except ValueError:
        count = 0
    if count < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return count


def cluster_of(arguments: Any) -> Cluster:
    """Return the cluster to plan for.

    Raises:
        InvalidArgumentError: A device, cluster or unit is unknown, or links do not join all ranks.
    """
    ranks, named = arguments.ranks, arguments.cluster
    if named and (arguments.device or arguments.link):
        raise InvalidArgumentError(
            "--cluster has a device and links: leave out --device and --link"
        )
    if arguments.link or arguments.device:
        cluster = _of_device(arguments.device, arguments.link, ranks)
    elif named and Path(named).exists():
        cluster = read_cluster(Path(named), ranks)
    elif named and Path(named).suffix:
        raise InvalidArgumentError(f"--cluster {named}: there is no such file")
    else:
        cluster = cluster_named(named or DEFAULT, ranks)
    if arguments.memory is None:
        return cluster
    memory = int(quantity(arguments.memory, BYTES, "--memory"))
    return replace(cluster, device=replace(cluster.device, memory=memory))


def _of_device(name: str | None, links: Sequence[str], ranks: int) -> Cluster:
    if name is None:
        raise InvalidArgumentError("--link is for --device: say which")
    device = device_named(name)
    if links or ranks == 1:
        return Cluster(ranks, device, tuple(map(_link, links)))
    for each in CLUSTERS:
        cluster = cluster_named(each, ranks)
        if cluster.device == device:
            return cluster
    raise InvalidArgumentError(
        f"links of {name} are not known: say --link 8:3us:300GB/s {ranks}:8us:25GB/s with those of "
        "yours, the innermost first"
    )


def _link(text: str) -> Link:
    words = text.split(":")
    if len(words) != 3 or not words[0].isdecimal():
        raise InvalidArgumentError(
            f"--link {text!r} is not RANKS:LATENCY:BANDWIDTH, such as 8:3us:300GB/s"
        )
    latency = quantity(words[1], SECONDS, f"latency of --link {text}")
    bandwidth = quantity(words[2], BYTES_A_SECOND, f"bandwidth of --link {text}")
    return Link(int(words[0]), latency, bandwidth)


def options_of(arguments: Any) -> Options:
    """Return the search options that the arguments select."""
    names = ("micro_rows", "zero", "recompute", "cp_methods")
    found: dict[str, Any] = {
        name: tuple(values) for name in names if (values := getattr(arguments, name))
    }
    if arguments.schedule:
        found["schedules"] = tuple((name, CHUNKS.get(name, 1)) for name in arguments.schedule)
    if arguments.sequence_parallel:
        found["sequence_parallel"] = tuple(each == "on" for each in arguments.sequence_parallel)
    return Options(**found, sizes=sizes_of(arguments))


def sizes_of(arguments: Any) -> dict[str, list[int]]:
    """Return the sizes to which the arguments restrict each axis."""
    return {axis: sizes for axis in AXES if (sizes := getattr(arguments, axis))}


def cuts_of(arguments: Any, experts: int) -> list[Cut]:
    """Return the cuts to describe.

    Args:
        arguments: Parsed arguments with `ranks`, and sizes if any are named.
        experts: Number of experts in a layer; 1 for a dense model.
    """
    from .describing.describe import MOST, usual_cuts

    ranks = arguments.ranks
    shares = tuple(each == "on" for each in arguments.sequence_parallel or ("off", "on"))
    eps = arguments.ep or [n for n in range(1, MOST + 1) if ranks % n == 0 and experts % n == 0]
    tried = arguments.recompute or ["none"]
    selective = [False] * (tried != ["selective"]) + [True] * ("selective" in tried)
    return usual_cuts(
        ranks, tp=arguments.tp, cp=arguments.cp, ep=eps, sequence_parallel=shares,
        methods=arguments.cp_methods or ("ring",), selective=selective,
    )  # fmt: skip
