"""Describe a call: its text, and the source line that made it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any
from zlib import crc32

from torch import Tensor
from torch.distributed import ProcessGroup

from ..dist import get_rank
from ..dist.building import describe

_PACKAGE = __name__.rpartition(".guard.")[0] + "."  # this library, also in a vendored copy
_SKIPPED = (_PACKAGE, "torch.", "contextlib", "functools")


def collective_texts(call: str, facts: Sequence[Any]) -> tuple[str, str]:
    """Return the text that must be the same on every member, and the same text with strides."""
    text = describe(call, *facts)
    strides = [
        str(list(fact.stride()))
        for fact in facts
        if isinstance(fact, Tensor) and not fact.is_contiguous()
    ]
    return text, f"{text} strides {', '.join(strides)}" if strides else text


def message_text(data: Tensor, peer: int, sends: bool) -> str:
    """Describe a send or receive of this rank."""
    shape = describe("", data)[1:-1]
    way = f"send({shape}) to" if sends else f"recv({shape}) from"
    return f"{way} rank {peer}"


def message_label(group: ProcessGroup, peer: int, tag: int, sends: bool) -> str:
    """Return a readable name for the channel of messages between this rank and another."""
    src, dst = (get_rank(), peer) if sends else (peer, get_rank())
    tagged = f" (tag {tag})" if tag else ""
    return f"messages from rank {src} to rank {dst} in {group_label(group)}{tagged}"


def group_label(group: ProcessGroup) -> str:
    """Return a readable name for a group, such as `tp` for the description `scaletorch_tp`."""
    name = (group.group_desc or "").removeprefix("scaletorch_")
    if name in ("", "undefined"):
        name = f"group {group.group_name}"
    return "the default group" if name == "default_pg" else name


def call_site() -> tuple[str, int]:
    """Return the first frame outside this library, `file.py:33 in function`, and its checksum."""
    frame: FrameType = sys._getframe(3)  # the caller of the recorder
    while True:
        inside = frame.f_globals.get("__name__", "").startswith(_SKIPPED)
        outer = frame.f_back
        if not inside or outer is None:
            break
        frame = outer
    file = "/".join(frame.f_code.co_filename.rsplit("/", 2)[-2:])[-40:]
    text = encoded(f"{file}:{frame.f_lineno} in {frame.f_code.co_name}")[:72]
    return text.decode(errors="replace"), crc32(text)


def encoded(text: str) -> bytes:
    """Return the text in UTF-8; file names may have characters that are not in it."""
    return text.encode(errors="backslashreplace")
