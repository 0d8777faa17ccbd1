"""All public names of the package; the package imports each on first access."""

from ._version import __version__
from .pipeline_parallel import (
    PipelineParallel,
    train_step_pipeline,
    train_step_pipeline_1f1b,
    train_step_pipeline_afab,
)
from .pp_comms import bidirectional_pipeline_communicate, pipeline_communicate
from .runtime.mail import StageError
from .schedules import (
    SCHEDULES,
    Action,
    Builder,
    Costs,
    Report,
    Schedule,
    ScheduleError,
    Span,
    Timeline,
    afab,
    check,
    dualpipe_v,
    forward_only,
    interleaved_1f1b,
    looped_breadth_first,
    one_f_one_b,
    simulate,
    zb_h1,
    zb_v,
)
from .schedules.builders import AnySchedule
from .splitting.balance import distribute_layers
from .splitting.split import Split, layers_of
from .stages.cut import PassThrough
from .stages.materialize import materialize, meta_parameters
from .steps.step import pipeline_forward

__all__ = [
    "SCHEDULES",
    "Action",
    "AnySchedule",
    "Builder",
    "Costs",
    "PassThrough",
    "PipelineParallel",
    "Report",
    "Schedule",
    "ScheduleError",
    "Span",
    "Split",
    "StageError",
    "Timeline",
    "__version__",
    "afab",
    "bidirectional_pipeline_communicate",
    "check",
    "distribute_layers",
    "dualpipe_v",
    "forward_only",
    "interleaved_1f1b",
    "layers_of",
    "looped_breadth_first",
    "materialize",
    "meta_parameters",
    "one_f_one_b",
    "pipeline_communicate",
    "pipeline_forward",
    "simulate",
    "train_step_pipeline",
    "train_step_pipeline_1f1b",
    "train_step_pipeline_afab",
    "zb_h1",
    "zb_v",
]
