"""The example that fine-tunes adapters: they learn, and are served merged and unmerged."""

from __future__ import annotations

import importlib.util
import re

import pytest

for _package in ("transformers", "fastapi", "uvicorn", "openai"):
    pytest.importorskip(_package)

import finetune_lora  # noqa: E402


@pytest.mark.slow
@pytest.mark.parametrize("package", ["own", "peft"])
def test_adapter_is_learned_and_served(package: str, capsys: pytest.CaptureFixture[str]) -> None:
    if package == "peft" and importlib.util.find_spec("peft") is None:
        pytest.skip("peft is not installed")
    assert finetune_lora.main(["--peft"] if package == "peft" else []) == 0
    shown = capsys.readouterr()
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", shown.err)]
    assert losses[-1] < 0.2 < losses[0]
    served, beside = re.findall(r"^(?:served|unmerged).*: +'(.*)'$", shown.out, re.MULTILINE)
    assert served == beside == finetune_lora.TEXTS[0][len(finetune_lora.PROMPT) :][:12]


def test_merging_gives_what_the_adapters_gave() -> None:
    import torch

    from small_checkpoint import make_model

    model = finetune_lora.with_adapters(make_model(64, 1), 4, 8.0, by_peft=False)
    adapters = [m for m in model.modules() if isinstance(m, finetune_lora.LowRank)]
    assert len(adapters) == 7
    tokens = torch.arange(16)[None]
    with torch.no_grad():
        before = model(tokens).logits
        for each in adapters:
            each.B.weight.normal_(std=0.1)
        expected = model(tokens).logits
        assert not torch.allclose(before, expected, atol=1e-3)
        torch.testing.assert_close(finetune_lora.merged(model, False)(tokens).logits, expected)
        torch.testing.assert_close(model(tokens).logits, expected)
