"""Compiles one signature of a kernel for one device; no GPU is needed.

NVIDIA and AMD: Triton, into cubin, PTX and hsaco. Intel: `ocloc`, from OpenCL C.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from .devices import BY_NAME, Device
from .errors import ImageError, NoKernelError
from .images import PACKAGE, Image
from .kernel import Kernel, OpenClSource, Signature, TritonSource

# What drivers of CUDA 12.0 read, which every torch for CUDA 12 and 13 runs on. Of all targets of
# NVIDIA, so that sm_80 and its PTX are compiled once.
_PTX_VERSION = 80
# Read as text, so no function leads to it.
_RULES = "ops/optimizer_step/rules.py"
INSTALL = {
    "nvidia": "pip install 'oxytorch[aot]'",
    "amd": "pip install 'oxytorch[aot]'",
    "intel": "apt install intel-opencl-icd",
}


@dataclass(frozen=True)
class Compiled:
    """Compiled code with the record of what a launch needs to know, which is not in a pack."""

    code: bytes
    image: Image

    @classmethod
    def of(cls, kernel: str, signature: str, code: bytes, **facts: Any) -> Compiled:
        """facts: the fields of `Image` that the compiler knows."""
        place: dict[str, Any] = {"offset": 0, "length": 0, "sha256": "", "source": ""}
        return cls(code, Image(kernel, signature, size=len(code), **place, **facts))


def missing(device: Device) -> str:
    """What has to be installed before kernels can be built for a device; "" if nothing has."""
    if device.vendor == "intel":
        from . import ocloc

        absent = ocloc.missing()
        return f"{absent}; {INSTALL['intel']}" if absent else ""
    if importlib.util.find_spec("triton") is None:
        return f"Triton is not installed; {INSTALL[device.vendor]}"
    from triton import knobs

    if knobs.runtime.interpret:
        return "Triton interprets kernels (TRITON_INTERPRET is set); unset it"
    return ""


def key(kernel: Kernel, signature: Signature, device: Device) -> str:
    """Names what decides the compiled code: source with all it calls, options, compiler, device."""
    if device.vendor == "intel":
        parts = _opencl_parts(kernel.opencl(signature), device)
    else:
        parts = _triton_parts(kernel.triton(signature), device.name)
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def compile_for(kernel: Kernel, signature: Signature, device: Device) -> Compiled:
    """Compiles a signature for a device of the list."""
    if device.vendor == "intel":
        return _compile_opencl(kernel, signature, device)
    return _compile_triton(kernel, signature, device.name)


def compile_here(kernel: Kernel, signature: Signature, device: str) -> Compiled:
    """Compiles with Triton for any device of NVIDIA or AMD, in the list or not.

    Raises NoKernelError where Triton is not installed or fails.
    """
    if importlib.util.find_spec("triton") is None:
        raise NoKernelError("Triton is not installed")
    import triton

    try:
        return _compile_triton(kernel, signature, device)
    except Exception as error:
        message = str(error).strip().splitlines() or [""]
        raise NoKernelError(
            f"Triton {triton.__version__} fails: {type(error).__name__}: {message[0]}"
        ) from error


def _gpu_target(device: str) -> Any:
    from triton.backends.compiler import GPUTarget

    if device.startswith("gfx"):
        return GPUTarget("hip", device, 64 if device.startswith("gfx9") else 32)
    number = re.search(r"\d+$", device)
    if number is None:
        raise ValueError(f"expected a device such as sm_90 or gfx942, got {device!r}")
    return GPUTarget("cuda", int(number[0]), 32)


def _options(source: TritonSource, device: str) -> dict[str, Any]:
    options = {
        "num_warps": source.num_warps,
        "num_stages": source.num_stages,
        "enable_fp_fusion": False,
    }
    if source.registers and not device.startswith("gfx"):
        options["maxnreg"] = source.registers
    # Later chips need later PTX.
    if not device.startswith("gfx") and _gpu_target(device).arch < 90:
        options["ptx_version"] = _PTX_VERSION
    return options


def _triton_parts(source: TritonSource, device: str) -> list[Any]:
    import triton

    _hash_callees_first([source.function, *source.constants.values()], set())
    constants = {
        name: getattr(value, "cache_key", None) or repr(value)
        for name, value in source.constants.items()
    }
    return [
        *(device, triton.__version__, source.function.cache_key),
        *(list(source.arguments.items()), list(constants.items())),
        *(sorted(source.aligned), _options(source, device)),
    ]


def _hash_callees_first(functions: Iterable[Any], seen: set[int]) -> None:
    """Has Triton make the keys of functions, those of what they call first.

    Its key of a function leaves out the constants of a callee that has no key yet, and so would
    depend on what was compiled before.
    """
    for function in functions:
        # Asked of the type: the key is made when it is asked for.
        if hasattr(type(function), "cache_key") and id(function) not in seen:
            seen.add(id(function))
            _hash_callees_first(_named(function.fn.__code__, function.fn.__globals__), seen)
            assert function.cache_key


def _compile_triton(kernel: Kernel, signature: Signature, device: str) -> Compiled:
    import triton
    from triton.compiler import ASTSource

    source = kernel.triton(signature)
    function = source.function
    order = {name: position for position, name in enumerate(function.arg_names)}
    given = [*source.arguments, *source.constants]
    if sorted(given) != sorted(order):
        raise ValueError(
            f"{kernel.name}/{signature.name}: expected the arguments {', '.join(order)}, got "
            f"{', '.join(given)}"
        )
    arguments = sorted(source.arguments, key=order.__getitem__)
    types = {name: source.arguments.get(name, "constexpr") for name in order}
    attributes = {(order[name],): [["tt.divisibility", 16]] for name in source.aligned}
    # Before Triton compiles: it would make keys in another order.
    parts = json.dumps(_triton_parts(source, device)).encode()
    built = triton.compile(
        ASTSource(function, types, dict(source.constants), attributes),
        target=_gpu_target(device),
        options=_options(source, device),
    )
    facts = built.metadata
    if getattr(facts, "global_scratch_size", 0) or getattr(facts, "profile_scratch_size", 0):
        raise ValueError(f"{kernel.name}/{signature.name}: kernels with scratch are not launched")
    form = "ptx" if device.startswith("compute") else "hsaco" if device[0] == "g" else "cubin"
    code = built.asm[form]
    return Compiled.of(
        *(kernel.name, signature.name, code.encode() if isinstance(code, str) else code),
        entry=facts.name,
        threads=facts.num_warps * facts.target.warp_size,
        shared=facts.shared,
        arguments=tuple(source.arguments[name] for name in arguments),
        aligned=tuple(n for n, name in enumerate(arguments) if name in source.aligned),
        scratch=2,
        key=hashlib.sha256(parts).hexdigest(),
        compiler=f"Triton {triton.__version__}",
    )


def sources(kernel: Kernel, signature: Signature, device: Device) -> tuple[str, ...]:
    """Files of the package from which a kernel is made, relative to it: the rules, those of the
    folder in which the kernel is recorded, and those of every function that Triton compiles into
    it. Empty for a kernel that is recorded outside of the package."""
    make: Any = kernel.opencl if device.vendor == "intel" else kernel.triton
    while isinstance(make, functools.partial):
        make = make.func
    record = Path(make.__code__.co_filename)
    if PACKAGE not in record.parents:
        return ()
    found = {PACKAGE / _RULES, *record.parent.rglob("*.py"), *record.parent.rglob("*.cl")}
    if device.vendor != "intel":
        found |= _called(kernel.triton(signature))
    inside = [path for path in found if PACKAGE in path.parents]
    return tuple(sorted(path.relative_to(PACKAGE).as_posix() for path in inside))


def _called(source: TritonSource) -> set[Path]:
    found: set[Path] = set()
    seen: set[int] = set()
    todo = [source.function, *source.constants.values()]
    while todo:
        function = todo.pop()
        if not hasattr(type(function), "cache_key") or id(function) in seen:
            continue
        seen.add(id(function))
        python = function.fn
        found.add(Path(python.__code__.co_filename))
        todo += _named(python.__code__, python.__globals__)
    return found


def _named(code: CodeType, scope: dict[str, Any]) -> Iterator[Any]:
    """Values of the global names in a function's code, also as attributes of modules."""
    values = [scope[name] for name in code.co_names if name in scope]
    yield from values
    for module in values:
        if isinstance(module, ModuleType):
            yield from (getattr(module, name, None) for name in code.co_names)


def _opencl_parts(source: OpenClSource, device: Device) -> list[Any]:
    from . import ocloc

    return [
        *(device.name, ocloc.version(), source.text, source.function),
        *(list(source.arguments.items()), source.group, list(source.options)),
    ]


def _compile_opencl(kernel: Kernel, signature: Signature, device: Device) -> Compiled:
    from . import ocloc

    source = kernel.opencl(signature)
    return Compiled.of(
        *(kernel.name, signature.name, ocloc.compile_opencl(source, device.name)),
        entry=source.function,
        threads=source.group,
        shared=0,
        arguments=tuple(source.arguments.values()),
        aligned=(),
        scratch=0,
        key=hashlib.sha256(json.dumps(_opencl_parts(source, device)).encode()).hexdigest(),
        compiler=f"ocloc {ocloc.version()}",
    )


_ELF = b"\x7fELF"
_SPIRV = (0x07230203).to_bytes(4, "little")
_MACHINES = {"nvidia": 190, "amd": 224}


def validate(code: bytes, device: Device, subject: str) -> None:
    """Raises ImageError where code is not of the form that the device takes.

    Intel's code is taken apart by ocloc, where it is installed.
    """
    if device.vendor == "intel":
        from . import ocloc

        if device.fallback:
            good = code[:4] in (_SPIRV, _SPIRV[::-1])
        elif ocloc.missing():
            good = code[:4] == _ELF
        else:
            try:
                ocloc.check(code, device.name)
            except ocloc.OclocError as error:
                raise ImageError(f"{subject}: {error}") from error
            good = True
    elif device.fallback:
        good = b".version" in code[:4096] and b".entry" in code
    else:
        good = (
            code[:4] == _ELF and int.from_bytes(code[18:20], "little") == _MACHINES[device.vendor]
        )
    if not good:
        raise ImageError(f"{subject}: not code for {device.name}")


def compilers_of(devices: list[Device]) -> dict[str, str]:
    """What is missing for some of the devices: by device name."""
    absent = {device.name: missing(device) for device in devices}
    return {name: reason for name, reason in absent.items() if reason}


def default_devices() -> list[Device]:
    """The devices that a wheel is built for where no list is given: those with a compiler here."""
    from .devices import DEFAULT_INTEL, DEFAULT_NVIDIA, with_fallbacks

    wanted = with_fallbacks([BY_NAME[name] for name in (*DEFAULT_NVIDIA, *DEFAULT_INTEL)])
    return [device for device in wanted if not missing(device)]
