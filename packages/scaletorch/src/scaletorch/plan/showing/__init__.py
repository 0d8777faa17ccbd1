"""A plan for people: tables in the terminal, one HTML page."""

from .page import page
from .report import explained, table

__all__ = ["explained", "page", "table"]
