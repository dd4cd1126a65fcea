"""Names of `cpu`."""

from __future__ import annotations

from .name import elsewhere, served

_CORES = "oxytorch.compat.cores"
_LAUNCH = "use `oxytorch ipexrun script.py`, or `oxytorch run script.py`"

NAMES = (
    *served(
        "cpu.runtime", "CPUPool", _CORES,
        "cores that the process may not use are left out, as there",
    ),
    *served("cpu.runtime", "pin Task MultiStreamModuleHint", "oxytorch.runtime"),
    *served("cpu.runtime", "MultiStreamModule", _CORES),
    *served("cpu.runtime", "get_core_list_of_node_id", "oxytorch.runtime"),
    *served("cpu.runtime", "is_runtime_ext_enabled get_default_num_streams", _CORES),
    *elsewhere(
        "cpu.runtime", "_MultiStreamBenchmarkModule",
        "use `oxytorch run --ninstances 4 script.py` to measure throughput",
    ),
    *served(
        "cpu.autocast._grad_scaler", "GradScaler", "oxytorch.compat.front",
        "`torch.amp.GradScaler(\"cpu\", ...)`",
    ),
    *served("cpu.autocast", "GradScaler", "oxytorch.compat.front"),
    *served("cpu.amp", "autocast", "torch.cpu.amp"),
    *elsewhere("cpu.launch", "main", _LAUNCH),
    *elsewhere("cpu.hypertune", "main", "use `oxytorch tune script.py`"),
    *elsewhere("cpu.auto_ipex", "main", "use `oxytorch run --optimize script.py`"),
    *served("cpu.utils.verbose", "verbose", "oxytorch.compat.front"),
    *elsewhere("cpu.nn._roi_align", "RoIAlign roi_align", "use torchvision.ops.roi_align"),
    *elsewhere(
        "cpu.tpp.optim", "SGD AdamW Lamb DistLamb",
        "use the class of that name of oxytorch.optim (Lamb in place of DistLamb)",
    ),
    *served("cpu.tpp.optim", "clip_grad_norm_", "oxytorch.optim"),
    *served(
        "_C",
        "_get_current_isa_level _get_highest_cpu_support_isa_level "
        "_get_highest_binary_support_isa_level",
        "oxytorch.compat.front", "names of [oxytorch's levels](isa.md), in capitals",
    ),
)  # fmt: skip
