"""Names for authors of strategies, in addition to the package's public names.

They are recorded and versioned like the public ones: a patch release changes none of them.
"""

from .groups import connect as connect
from .groups import connect_all as connect_all
from .groups import first_unused_number as first_unused_number
from .groups import groups_within as groups_within
from .groups import has_streams as has_streams
from .loss import mean_over as mean_over
from .module_helpers import around_compiled as around_compiled
from .module_helpers import class_before as class_before
from .module_helpers import deep_copy as deep_copy
from .module_helpers import divided_modules as divided_modules
from .module_helpers import eagerly as eagerly
from .module_helpers import mark_divided as mark_divided
from .module_helpers import mark_staged as mark_staged
from .module_helpers import matching as matching
from .module_helpers import no_match as no_match
from .module_helpers import refuse_generate as refuse_generate
from .module_helpers import runs_as_stages as runs_as_stages
from .module_helpers import shallow_copy as shallow_copy
from .module_helpers import show_output as show_output
from .module_helpers import uncompiled as uncompiled
from .module_state import Attributes as Attributes
from .module_state import ModuleState as ModuleState
from .module_state import digest as digest
from .module_state import digest_text as digest_text
from .module_state import restored as restored
from .update_scope import Scope as Scope
from .update_scope import known_elementwise as known_elementwise
from .update_scope import update_scope as update_scope
