"""Files of oxytorch that somebody altered who knows the format."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from oxytorch.core.tensor_file import Source, TensorFile, write

Change = Callable[[dict[str, Any], dict[str, Tensor]], None]


def forge(path: Path, change: Change) -> None:
    """Change the description and the tensors of a file, with the sum that belongs to them."""
    file = TensorFile(path)
    description = json.loads(file.metadata["description"])
    tensors = {name: file.tensor(name).clone() for name in file.places}
    change(description, tensors)
    content = json.dumps(description)
    sha256 = hashlib.sha256(content.encode()).hexdigest()
    metadata = {**file.metadata, "description": content, "sha256": sha256}
    write(path, {name: Source.of(tensor) for name, tensor in tensors.items()}, metadata)
