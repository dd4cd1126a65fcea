"""The passes, in the order in which they run. Each is one file with `run(context)`."""

from __future__ import annotations

from collections.abc import Callable

from ..context import OptimizeContext
from . import (
    attention,
    cast,
    channels_last,
    join,
    kernels,
    lstm,
    pack,
    program,
    rewrite,
)

PASSES: dict[str, tuple[str, Callable[[OptimizeContext], None]]] = {
    "program": (
        "run the operators of the whole model, fused, without its Python (needs sample_input)",
        program.run,
    ),
    "dropout": ("remove dropout and identity layers in evaluation mode", rewrite.run),
    "fold": ("fold batch normalization into the layer before it", rewrite.run),
    "fuse": ("give layers their activation and residual addition in the same sweep", rewrite.run),
    "cast": ("convert weights to the dtype asked for", cast.run),
    "kernels": ("run normalizations, activations and embedding bags in our kernels", kernels.run),
    "attention": (
        "compute torch's scaled dot-product attention by our op (needs sample_input)",
        attention.run,
    ),
    "lstm": ("pack the weights of LSTM layers", lstm.run),
    "join": ("compute linear layers that share an input as one (needs sample_input)", join.run),
    "pack": ("store weights in the order that the kernels want", pack.run),
    "channels_last": ("store the other convolution weights in channels-last order",
                      channels_last.run),
}  # fmt: skip
"""Name -> (what it does, function), which runs once: "dropout", "fold" and "fuse" share one."""

DEFAULT = tuple(name for name in PASSES if name not in ("program", "join", "channels_last"))
"""Those that change nothing but speed, and pay. `tune=True` also tries the others."""

__all__ = ["DEFAULT", "PASSES"]
