"""Language models on disk: the format of files that hold one, and what is checked of it.

A file is one of `core.described_file`. Its format is "oxytorch.language_model", its version "1".
The description has

    model        the record of the model (see `description.py`)
    positions    tokens that it was made for, or null
    generation   what is kept of its generation_config (see `language_model.Settings`)
"""

from __future__ import annotations

from ..core.described_file import DescribedFile
from .configured import checked_settings
from .consistent import check
from .description import Reader
from .language_model import LanguageModel
from .numbers import whole
from .record import FusedModel

FORMAT = "oxytorch.language_model"
VERSIONS = ("1",)
"""The one that is written, which is read. The order of weights in panels belongs to it: who changes
`ops/panels/layout.py` needs another."""


def read(file: DescribedFile) -> LanguageModel:
    """The model of a file; raises ValueError or RuntimeError for what a file may not hold."""
    record = Reader(file.tensor).model(file.part("model", dict))
    check(record)
    positions = file.part("positions", (int, type(None)))
    if positions is not None:
        whole("load", "positions", positions, 1, _most_positions(record))
    return LanguageModel(record, positions, checked_settings(file.part("generation", dict)))


def _most_positions(record: FusedModel) -> int:
    """How many tokens a model can take."""
    if record.positions is None:
        return 1 << 53  # as far as positions are exact
    table, before = record.positions
    return len(table.get_parameter("weight")) - before
