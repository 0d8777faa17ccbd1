"""The reference for the other programs: one process and plain PyTorch.

`python one_process.py runs/one`
"""

from __future__ import annotations

import sys

import torch
from small import Decoder, batch, build, loss_sum

from scaletorch import bisect


def step(folder: str) -> Decoder:
    """Train one step of the global batch, recorded."""
    model, (ids, labels) = build(), batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with bisect.record(folder, model=model) as tape:
        loss = loss_sum(model(ids), labels) / (labels != -100).sum()
        loss.backward()
        tape.put("loss", loss)
        optimizer.step()
    return model


if __name__ == "__main__":
    step(sys.argv[1])
