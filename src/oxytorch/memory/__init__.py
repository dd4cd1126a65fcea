"""Memory: traces of what a program allocates, replayed through allocators."""

from __future__ import annotations

from .record import Recording, record

__all__ = ["Recording", "record"]
