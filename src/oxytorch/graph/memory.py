"""What programs keep in memory between calls."""

from ..program.program import free_memory

__all__ = ["free_memory"]
