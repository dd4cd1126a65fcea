"""Everything that `oxytorch bench` measures; a new subject is a folder and a line here."""

from __future__ import annotations

from oxytorch.benchmark.core.subject import Subject
from oxytorch.benchmark.gpu import jobs as gpu
from oxytorch.benchmark.machine import jobs as machine
from oxytorch.benchmark.models import jobs as models
from oxytorch.benchmark.ops import jobs as ops
from oxytorch.benchmark.optim import jobs as optim
from oxytorch.benchmark.streams import jobs as streams
from oxytorch.benchmark.zoo import jobs as zoo

SUBJECTS: dict[str, Subject] = {
    subject.name: subject
    for subject in (
        models.SUBJECT,
        zoo.SUBJECT,
        streams.SUBJECT,
        ops.SUBJECT,
        optim.SUBJECT,
        gpu.STEPS,
        gpu.COLD_START,
        machine.LIMITS,
        machine.IMPORT_TIME,
        machine.OPTIMIZE_COST,
    )
}
"""Every subject by name, in the order of the help."""
