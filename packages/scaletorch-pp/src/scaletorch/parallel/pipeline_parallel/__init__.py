"""Pipeline parallelism for plain PyTorch modules: stages, schedules as data, one runtime."""

from ._version import __version__
from .cut import PassThrough
from .pipeline_parallel import (
    PipelineParallel,
    train_step_pipeline_1f1b,
    train_step_pipeline_afab,
)
from .pp_comms import bidirectional_pipeline_communicate, pipeline_communicate
from .schedules import SCHEDULES, Action, Schedule, afab, one_f_one_b
from .split import Split, distribute_layers, infer_split
from .transfers import Step, Transfer, derive

__all__ = [
    "SCHEDULES",
    "Action",
    "PassThrough",
    "PipelineParallel",
    "Schedule",
    "Split",
    "Step",
    "Transfer",
    "__version__",
    "afab",
    "bidirectional_pipeline_communicate",
    "derive",
    "distribute_layers",
    "infer_split",
    "one_f_one_b",
    "pipeline_communicate",
    "train_step_pipeline_1f1b",
    "train_step_pipeline_afab",
]
