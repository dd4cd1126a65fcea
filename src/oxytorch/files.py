"""Models on disk: `oxytorch.save` and `oxytorch.load`."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from .core.described_file import DescribedFile
from .core.whole_file import check_destination

if TYPE_CHECKING:
    from .llm import LanguageModel
    from .program import ProgramModel

_FORMATS = {
    "oxytorch.program": "oxytorch.program.files",
    "oxytorch.language_model": "oxytorch.llm.files",
}
"""By the format of a file who reads it."""


def save(
    model: ProgramModel | LanguageModel | nn.Module,
    path: str | Path,
    sample_input: Any = None,
    dynamic_shapes: Any = None,
) -> None:
    """Write a model and its tensors to one file, which `load` opens in any process.

    model: what `oxytorch.optimize` returned for an exported program; what `oxytorch.llm.optimize`
        returned; or another module, which `torch.export` exports with `sample_input`.
    path: a file that exists is replaced; a process that has loaded it keeps the old one.
    sample_input: for a module that is exported: a tensor (the only argument), a tuple (positional
        arguments) or a mapping (keyword arguments).
    dynamic_shapes: which sizes of the inputs may differ from the sample's, as `torch.export.export`
        takes it: `({0: torch.export.Dim.DYNAMIC},)` for any batch size of the only argument.
        Without it the program takes inputs of the sample's sizes.

    Of a language model the file has what `generate` needs: packed weights, the cache's format, end
    and padding tokens, stop strings and repetition penalty. It has no tokenizer.

    Raises TypeError if `model` is none of these or the sample or `dynamic_shapes` is missing or not
    wanted, FileNotFoundError or IsADirectoryError if no file can be written to `path`, ValueError
    if the module is in training mode or the file cannot hold it, and torch's errors where a module
    cannot be exported.
    """
    if sample_input is None and dynamic_shapes is not None:
        raise TypeError(
            "save: expected no dynamic_shapes without sample_input; it is for a module that is "
            "exported: oxytorch.save(model, path, sample_input=x, dynamic_shapes=...)"
        )
    path = Path(path)
    check_destination(path)
    if sample_input is None and not _is_program(model):
        from .llm import saving as language_models  # which a program has no use for

        if language_models.is_language_model(model):
            return language_models.save(model, path)
    from .program import files as programs

    return programs.save(model, path, sample_input, dynamic_shapes)


def _is_program(model: object) -> bool:
    from .program import ProgramModel

    return isinstance(model, ProgramModel)


def load(path: str | Path, *, verify: bool = False, shared: bool = True) -> Any:
    """Open a file that `save` wrote. Its tensors are mapped into memory, not read.

    path: must not be written to as long as the model is used; replacing the file is safe.
    verify: compare the tensors with their checksums, which reads all of them. The rest is always
        compared.
    shared: False copies the tensors instead, into huge pages, which many cores read faster; then
        each process has its own.

    Returns an `oxytorch.program.ProgramModel`, which is called like the model that was saved, or an
    `oxytorch.llm.LanguageModel`, which generates. Results with named fields come back as `Fields`,
    whatever class they had.

    Raises CheckpointError, a ValueError, if the file is damaged, of another kind or of a newer
    version, or asks for what a file may not do.
    """
    file = DescribedFile(Path(path), _FORMATS, shared)
    format = importlib.import_module(_FORMATS[file.format])
    return file.read(format.read, format.VERSIONS, verify)
