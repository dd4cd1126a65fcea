"""What a release is made with: the checks of wheels, the preparation of the tree, the workflows."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import oxytorch
from scripts import module_of

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def _tool(name: str) -> ModuleType:
    return module_of(ROOT / "tools" / f"{name}.py")


METADATA = f"""\
Metadata-Version: 2.4
Name: oxytorch
Version: {oxytorch.__version__}
Summary: short
License-Expression: Apache-2.0 AND PSF-2.0
Requires-Python: >=3.10
Classifier: Typing :: Typed
Requires-Dist: torch>=2.10
Requires-Dist: transformers>=4.50; extra == "llm"

A README.
"""


def _wheel(folder: Path, tag: str = "manylinux_2_28_x86_64", **changed: str | None) -> Path:
    """A wheel of the right names; a changed one has other contents, or is left out."""
    made = f"oxytorch-{oxytorch.__version__}"
    info = f"{made}.dist-info"
    tool = _tool("check_wheel")
    names = [re.sub(r"oxytorch-.*?dist-info", info, name) for name in tool.NEEDED]
    contents: dict[str, str | None] = dict.fromkeys(names, "")
    contents[f"{info}/METADATA"] = METADATA
    contents[f"{info}/entry_points.txt"] = "\n".join(tool.ENTRIES)
    contents |= {name.replace("INFO", info): text for name, text in changed.items()}
    path = folder / f"{made}-py3-none-{tag}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in contents.items():
            if text is not None:
                archive.writestr(name, text)
    return path


def test_a_right_wheel_passes(tmp_path: Path) -> None:
    assert _tool("check_wheel").wrong_in_wheel(_wheel(tmp_path)) == []


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"oxytorch/py.typed": None}, "expected oxytorch/py.typed, found none"),
        ({"oxytorch/lib/liboxytorch.so": None}, "expected oxytorch/lib/liboxytorch.so"),
        ({"INFO/licenses/LICENSE": None}, "licenses/LICENSE, found none"),
        ({"tests/test_it.py": ""}, "tests/test_it.py"),
        ({"oxytorch/ops/softmax/kernel.cpp": ""}, "oxytorch/ops/softmax/kernel.cpp"),
        ({"oxytorch/ops/_template/__init__.py": ""}, "oxytorch/ops/_template/__init__.py"),
        ({"oxytorch/.scratch/it.py": ""}, "oxytorch/.scratch/it.py"),
        ({"oxytorch.libs/libgomp.so.1": ""}, "oxytorch.libs/libgomp.so.1"),
        ({"INFO/entry_points.txt": ""}, "entry points: expected 'oxytorch = oxytorch.__main__"),
        ({"INFO/METADATA": METADATA.replace(oxytorch.__version__, "9")}, "version: expected"),
        ({"INFO/METADATA": METADATA.replace(">=2.10", ">=2.9")}, "dependencies: expected torch"),
        ({"INFO/METADATA": METADATA.replace("Classifier", "No")}, "expected Classifier"),
    ],
)
def test_a_wrong_wheel_is_refused(changed: dict[str, Any], said: str, tmp_path: Path) -> None:
    assert said in "\n".join(_tool("check_wheel").wrong_in_wheel(_wheel(tmp_path, **changed)))


def test_a_wheel_of_this_machine_alone_is_refused(tmp_path: Path) -> None:
    wheel = _wheel(tmp_path, tag="linux_x86_64")
    assert "tag: expected" in "\n".join(_tool("check_wheel").wrong_in_wheel(wheel))


def test_the_version_is_that_of_the_package() -> None:
    assert _tool("check_wheel").version() == oxytorch.__version__
    assert _tool("prepare_release").version() == oxytorch.__version__


def test_links_of_the_readme_lead_to_the_repository() -> None:
    change = _tool("prepare_release").with_full_links
    text = "[a](docs/a.md#b), ![c](docs/c.svg), [d](#e), [f](https://f.org)"
    assert change(text, "https://host/own/it", "v1") == (
        "[a](https://host/own/it/blob/v1/docs/a.md#b), "
        "![c](https://host/own/it/raw/v1/docs/c.svg), [d](#e), [f](https://f.org)"
    )
    made = change((ROOT / "README.md").read_text(), "https://h", "v1")
    links = re.findall(r"\]\(([^)]+)\)", made)
    assert len(links) > 20 and all(link.startswith(("https:", "#")) for link in links)


def test_addresses_are_added_once() -> None:
    change = _tool("prepare_release").with_urls
    made = change("[project]\n", "https://host/own/it", "v1")
    assert made.startswith("[project]\n\n[project.urls]\nSource = ")
    with pytest.raises(ValueError, match="expected no"):
        change(made, "https://host/own/it", "v1")


def test_a_tag_of_another_version_is_refused() -> None:
    tool = ROOT / "tools" / "prepare_release.py"
    command = [sys.executable, str(tool), "--url", "https://h", "--tag", "v99"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and f"expected v{oxytorch.__version__}" in done.stderr


def test_the_example_that_wheels_are_tried_with_is_the_readmes() -> None:
    assert "oxytorch.optimize(" in _tool("try_wheel").readme_example()
    for path in _tool("try_wheel").SPREAD:
        assert (ROOT / path).is_file(), path


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_names_jobs_and_files_that_exist(path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    workflow = yaml.safe_load(path.read_text())
    jobs = workflow["jobs"]
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    seen = 0
    for job in jobs.values():
        needs = job.get("needs", [])
        assert {needs} if isinstance(needs, str) else set(needs) <= set(jobs)
        assert job["timeout-minutes"] if "strategy" in job else True
        for step in job["steps"]:
            for line in step.get("run", "").replace(" && ", "\n").splitlines():
                words = shlex.split(line)
                if words[0] in ("python", "bash"):
                    assert (ROOT / words[1]).is_file(), line
                    seen += 1
                elif words[0] == "make":
                    assert words[-1] in targets, line
                    seen += 1
    assert seen or path.name != "release.yml"


def test_workflows_are_there() -> None:
    assert [path.name for path in WORKFLOWS] == ["ci.yml", "release.yml"]
