"""Which layout to train with: how much memory, how long, from the object that will run."""

from .buckets import Optimizer
from .cluster import Cluster, Device, Link
from .describing import describe, usual_cuts
from .description import Affine, Behaviour, Block, Cut, Description, Parameter, Sent, Work
from .estimate import Estimate, Memory, Time, Traffic
from .explaining import Line, lines
from .layout import Layout
from .options import Options, Refused, legal
from .search import Plan, plan

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
    "Line",
    "Link",
    "Memory",
    "Optimizer",
    "Options",
    "Parameter",
    "Plan",
    "Refused",
    "Sent",
    "Time",
    "Traffic",
    "Work",
    "describe",
    "legal",
    "lines",
    "plan",
    "usual_cuts",
]
