"""What every backend of the table needs, lacks, and whether this machine has it."""

from .report import COLUMNS, backend_rows, backend_table

__all__ = ["COLUMNS", "backend_rows", "backend_table"]
