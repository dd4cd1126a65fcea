"""What a linear layer or a convolution does to its result before it leaves the registers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from .panels.epilogues import ACTIVATIONS

_BINARY: dict[str, Callable[..., torch.Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
}


@dataclass(frozen=True)
class PostOp:
    """An optional binary operation with a second tensor, then an optional activation.

    name, scalars and algorithm: `relu`, `sigmoid`, `tanh`, `silu`, `hardswish`, `hardsigmoid`,
    `leaky_relu` [slope], `hardtanh` [low, high] (clamp, ReLU6), `gelu` with algorithm `none` or
    `tanh`. other_first: whether the second tensor is the binary operation's first operand, which of
    two orders in memory is the one that torch's result has.
    """

    name: str = "none"
    scalars: tuple[float, ...] = ()
    algorithm: str = ""
    binary: str | None = None
    other_first: bool = False

    def __post_init__(self) -> None:
        if self.name not in _UNARY:
            raise ValueError(f"post_op: expected name in {sorted(_UNARY)}, got {self.name!r}")
        if self.binary is not None and self.binary not in _BINARY:
            raise ValueError(f"post_op: expected binary in {sorted(_BINARY)}, got {self.binary!r}")
        if self.other_first and self.binary == "sub":
            raise ValueError("post_op: expected other_first for add or mul, got it for sub")

    @property
    def onednn_name(self) -> str:
        """The name that torch's operators for oneDNN take."""
        return "swish" if self.name == "silu" else self.name

    @classmethod
    def of_onednn(cls, name: str, algorithm: str) -> PostOp:
        """The activation that those operators call so."""
        return cls("silu" if name == "swish" else name, algorithm=algorithm)

    @property
    def epilogue(self) -> str | None:
        """The epilogue of `linear_panels` that computes it; None if there is none."""
        if self.binary is not None:
            sums = {"none": "add", "relu": "add_relu"}
            return sums.get(self.name) if self.binary == "add" else None
        if self.name == "hardtanh":
            return "relu6" if self.scalars == (0.0, 6.0) else None
        if self.name == "gelu":
            return "gelu_tanh" if self.algorithm == "tanh" else "gelu"
        return self.name if self.name in ACTIVATIONS else None

    @property
    def is_fused(self) -> bool:
        """Whether oneDNN computes the activation as torch does; some of its forms turn NaN to 0."""
        return self.name not in ("relu", "hardtanh", "hardsigmoid")

    def after(self, result: torch.Tensor, other: torch.Tensor | None = None) -> torch.Tensor:
        """Apply the post-operation to a result in plain PyTorch."""
        if self.binary is not None:
            if other is None:
                raise ValueError(f"post_op: expected other for binary {self.binary!r}, got None")
            operands = (other, result) if self.other_first else (result, other)
            result = _BINARY[self.binary](*operands)
        return _UNARY[self.name](result, self)

    def after_(self, result: torch.Tensor, other: torch.Tensor | None = None) -> torch.Tensor:
        """The same, in the memory of `result` where that has the shape and dtype for it."""
        if self.binary is not None or self.name not in _IN_PLACE:
            return self.after(result, other)
        return _IN_PLACE[self.name](result, self)

    def without_binary(self) -> PostOp:
        """The activation alone."""
        return PostOp(self.name, self.scalars, self.algorithm)

    def __str__(self) -> str:
        name = "clamp" if self.name == "hardtanh" else self.name
        parts = [part for part in (self.binary, name) if part not in (None, "none")]
        return "+".join(str(part) for part in parts)


_UNARY: dict[str, Callable[[torch.Tensor, PostOp], torch.Tensor]] = {
    "none": lambda x, p: x,
    "relu": lambda x, p: F.relu(x),
    "sigmoid": lambda x, p: torch.sigmoid(x),
    "tanh": lambda x, p: torch.tanh(x),
    "silu": lambda x, p: F.silu(x),
    "hardswish": lambda x, p: F.hardswish(x),
    "hardsigmoid": lambda x, p: F.hardsigmoid(x),
    "leaky_relu": lambda x, p: F.leaky_relu(x, p.scalars[0]),
    "hardtanh": lambda x, p: F.hardtanh(x, p.scalars[0], p.scalars[1]),
    "gelu": lambda x, p: F.gelu(x, approximate=p.algorithm),
}

_IN_PLACE: dict[str, Callable[[torch.Tensor, PostOp], torch.Tensor]] = {
    "relu": lambda x, p: torch.relu_(x),
    "hardtanh": lambda x, p: F.hardtanh_(x, p.scalars[0], p.scalars[1]),
    "hardsigmoid": lambda x, p: F.hardsigmoid(x, inplace=True),
}

NO_POST_OP = PostOp()


def with_post_op(product: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A reference, called by name: what `product` makes of the other arguments, then `post_op`."""

    def reference(post_op: PostOp, other: torch.Tensor | None, **arguments: object) -> torch.Tensor:
        return post_op.after(product(**arguments), other)

    return reference
