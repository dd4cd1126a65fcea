"""Child process of the demo: prints the peak memory of one variant, in bytes.

    python -m oxytorch.demo.memory VARIANT TEXT_FILE MOST_TEXTS

Counted is the resident memory above what the process holds after its imports: loading the weights,
`optimize`, and embedding the batch of the longest texts. Two such processes run side by side, so
each takes half of the threads.
"""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import torch

from .embedding import BATCH, Embedder, load_model, load_tokenizer, read_texts
from .variants import VARIANTS


def resident(field: str) -> int:
    """VmRSS (now) or VmHWM (the peak so far) of this process, in bytes."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    found = re.search(rf"^{field}:\s+(\d+) kB$", status, re.MULTILINE)
    if found is None:
        raise RuntimeError(f"/proc/self/status has no {field}")
    return int(found[1]) * 1024


def peak(name: str, text: Path, most: int) -> int:
    """Loads, optimizes and runs the variant called `name`; its peak bytes above the imports."""
    variant = next(variant for variant in VARIANTS if variant.name == name)
    torch.set_num_threads(max(1, torch.get_num_threads() // 2))
    tokenizer = load_tokenizer()
    importlib.import_module("transformers.models.bert.modeling_bert")
    imported = resident("VmRSS")
    texts = sorted(read_texts(text, most), key=len)[-BATCH:]
    # The name `model` is bound again, as in a user's program: the stock weights are not kept.
    model = load_model()
    model = variant.build(model, Embedder(model, tokenizer).tokens(texts[:2]))
    Embedder(model, tokenizer).embed(texts)
    return resident("VmHWM") - imported


if __name__ == "__main__":
    print(peak(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])))
