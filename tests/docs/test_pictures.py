"""Pictures are those that the tool draws, fit their text, and show the layers that imports have."""

from __future__ import annotations

import itertools
from pathlib import Path
from xml.etree import ElementTree

import pytest

import oxytorch
from oxytorch.__main__ import COMMANDS
from scripts import module_of
from test_import import LAYERS

ROOT = Path(__file__).parents[2]


TOOL = module_of(ROOT / "tools" / "draw_pictures.py")


@pytest.mark.parametrize("name", TOOL.PICTURES)
def test_picture_is_current(name: str) -> None:
    saved = (TOOL.FOLDER / name).read_text()
    assert saved == TOOL.PICTURES[name](), "run: python tools/draw_pictures.py"
    assert ElementTree.fromstring(saved).find("{http://www.w3.org/2000/svg}title") is not None


def test_text_that_does_not_fit_is_refused() -> None:
    picture = TOOL.Picture(100, 100, "title")
    with pytest.raises(ValueError, match="to fit 20 units"):
        picture.text(10, 10, 20, "too long a text")


def test_bands_of_the_picture_are_the_layers_of_imports() -> None:
    """Every package is shown, and each band may import those below it only."""
    package = Path(oxytorch.__file__).parent
    folders = {path.parent.name for path in package.glob("*/*.py")}
    place = {name: index for index, layer in enumerate(LAYERS) for name in layer}
    top = place["info"]
    commands, around, *bands = ({name.split("/")[0] for name, _ in band} for _, band in TOOL.BANDS)
    assert commands == {command.name for command in COMMANDS}
    only_commands = {"benchmark", "demo", "llm_command"}
    assert around == {name for name in folders & set(place) if place[name] >= top} - only_commands
    assert set().union(*bands) == {name for name in folders & set(place) if place[name] < top}
    for upper, lower in itertools.pairwise(bands):
        assert max(place[name] for name in lower) < min(place[name] for name in upper)
