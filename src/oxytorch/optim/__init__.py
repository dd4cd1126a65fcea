"""Optimizers: the classes of torch.optim with fused steps and smaller states.

Each takes the arguments of torch's class and three more: `master_weights="split"` trains bfloat16
parameters exactly as float32, `state_dtype` shrinks the states, `seed` fixes their rounding.
"""

from __future__ import annotations

from .adafactor import Adafactor
from .adagrad import Adagrad, RMSprop
from .adam import Adam, AdamW
from .clipping import clip_grad_norm_
from .lamb import Lamb, Lion
from .optimizer import FusedOptimizer
from .sgd import SGD, Lars

__all__ = [
    "SGD",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "FusedOptimizer",
    "Lamb",
    "Lars",
    "Lion",
    "RMSprop",
    "clip_grad_norm_",
]
