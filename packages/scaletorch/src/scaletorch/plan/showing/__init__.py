"""A plan for people: a table in the terminal, one HTML page."""

from .page import page
from .shown import Shown, grouped
from .table import explained, table

__all__ = ["Shown", "explained", "grouped", "page", "table"]
