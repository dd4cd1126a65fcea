"""Memory of devices and of the host: an allocator, its statistics, traces and what they show."""

from __future__ import annotations

from .record import Recording, record

__all__ = ["Recording", "record"]
