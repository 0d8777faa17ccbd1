"""Which layout to train with: how much memory, how long, from the object that will run."""

from .cluster import Cluster, Device, Link
from .describing import describe, usual_cuts
from .description import Affine, Behaviour, Block, Cut, Description, Parameter, Sent, Work
from .estimate import Estimate, Memory, Time, Traffic
from .layout import Layout

__all__ = [
    "Affine",
    "Behaviour",
    "Block",
    "Cluster",
    "Cut",
    "Description",
    "Device",
    "Estimate",
    "Layout",
    "Link",
    "Memory",
    "Parameter",
    "Sent",
    "Time",
    "Traffic",
    "Work",
    "describe",
    "usual_cuts",
]
