"""What goes wrong with checkpoints."""

from __future__ import annotations


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded; the text names the file, the tensor or the setting."""

    __module__ = "oxytorch"  # where its public name is
