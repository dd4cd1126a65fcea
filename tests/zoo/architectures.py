"""Every architecture of `transformers` in the zoo: name -> function that builds its `Case`.

All have random weights and tiny configurations; nothing is downloaded, and none needs more than
torch and transformers (no timm, torchvision or detectron2).
"""

from __future__ import annotations

from building import Build
from other_architectures import OTHER
from text_architectures import TEXT
from vision_architectures import VISION

ARCHITECTURES: dict[str, Build] = {**TEXT, **VISION, **OTHER}
