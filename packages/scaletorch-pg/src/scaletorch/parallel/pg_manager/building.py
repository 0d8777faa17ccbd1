"""Names for authors of strategies, in addition to the package's public names.

They are recorded and versioned like the public ones: a patch release changes none of them.
"""

from .digests import digest, digest_text
from .groups import connect, connect_all, first_unused_number, groups_within, has_streams
from .loss import mean_over
from .module_helpers import (
    around_compiled,
    class_before,
    deep_copy,
    divided_modules,
    eagerly,
    evaluating,
    forget_watchers,
    mark_divided,
    mark_staged,
    matching,
    no_match,
    refuse_generate,
    runs_as_stages,
    shallow_copy,
    show_output,
    uncompiled,
    watch_outputs,
)
from .module_state import Attributes, ModuleState, restored
from .update_scope import Scope, known_elementwise, update_scope

__all__ = [
    "Attributes",
    "ModuleState",
    "Scope",
    "around_compiled",
    "class_before",
    "connect",
    "connect_all",
    "deep_copy",
    "digest",
    "digest_text",
    "divided_modules",
    "eagerly",
    "evaluating",
    "first_unused_number",
    "forget_watchers",
    "groups_within",
    "has_streams",
    "known_elementwise",
    "mark_divided",
    "mark_staged",
    "matching",
    "mean_over",
    "no_match",
    "refuse_generate",
    "restored",
    "runs_as_stages",
    "shallow_copy",
    "show_output",
    "uncompiled",
    "update_scope",
    "watch_outputs",
]
