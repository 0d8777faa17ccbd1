"""All names of `building`, which imports each on first access."""

from ..runtime.mail import IN_FLIGHT as IN_FLIGHT
from ..splitting.balance import parameter_costs as parameter_costs
from ..splitting.split import sections_of as sections_of
from ..stages.calls import release as release
from ..stages.calls import surround as surround
from ..stages.cut import PassThrough as PassThrough
from ..stages.cut import forms_cast as forms_cast
from ..steps.step import read as read
