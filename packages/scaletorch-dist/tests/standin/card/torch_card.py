"""Stands in for CUDA: its backend, as NCCL, takes one rank a device of what a rank calls its host.

`STANDIN_DEVICES` is how many devices there are; with `STANDIN_REFUSES` the backend refuses itself.
"""

import os
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent))

import vendor

NAME, BACKEND = "card", "cardcl"


def refuse_duplicates(store, rank, size):
    """Raise what NCCL does where two ranks are on one device of one host."""
    import torch

    host = os.environ.get("NCCL_HOSTID", "this host")
    store.set(f"place {rank}", f"{host}, device {torch.card.current_device()}")
    places = [store.get(f"place {other}").decode() for other in range(size)]
    twins = [other for other, place in enumerate(places) if place == places[rank]]
    if len(twins) > 1:
        raise RuntimeError(f"Duplicate card detected: ranks {twins} both on {places[rank]}")


vendor.install(NAME, BACKEND, before=refuse_duplicates if "STANDIN_REFUSES" in os.environ else None)
