"""What the allocator raises."""

from __future__ import annotations

import torch


class OutOfMemoryError(torch.OutOfMemoryError):
    """A device or a limit has no more memory; the text says what holds it and what to do."""


class MemoryLibraryError(RuntimeError):
    """The allocator's library is missing, was called wrongly, or its source has failed."""
