"""Pictures of timelines: in the terminal, as SVG, and as a trace for Perfetto."""

from .svg import to_svg
from .terminal import to_text
from .trace import to_chrome_trace

__all__ = ["to_chrome_trace", "to_svg", "to_text"]
