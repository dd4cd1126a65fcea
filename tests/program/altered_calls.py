"""Calls of torch's operators with arguments that are altered at random, as a program that a file
holds makes them: each is refused, fails, or gives a result; no process ends by it.

    python -m tests.program.altered_calls [--seconds 300] [--only grid_sampler,_fft] [--part 1/2]

The calls that are altered are those of torch's own samples of its functions (needs the package
`expecttest`). A line is printed for each operator and call that ended its process, or that took
more than 20 seconds.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter, defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from oxytorch.program import check
from oxytorch.program.calls import in_order
from oxytorch.program.program import Some, Step, Steps, Value
from oxytorch.program.words import target_of, word_of

CALLS = 100
"""Of one operator by one process."""
SAMPLES = 4
"""Calls of an operator that are altered."""
ENOUGH = 4
"""Times that an operator ends a process, after which it is left."""
HANGS = 20
"""Seconds."""
MEMORY = 8 << 30
"""Bytes of address space of a process."""

Sample = tuple[Any, list[Any]]
"""The schema, and all arguments in its order."""

NUMBERS = (0, 1, -1, 2, 3, 5, 7, 64, 1000, -2, -7, 1 << 31, 1 << 62, (1 << 63) - 1, -(1 << 63))
FLOATS = (0.0, 1.0, -0.5, 1.7, 1e300, float("nan"), float("inf"), -1e-30)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int32, torch.bool)


class Recorded(TorchDispatchMode):
    """Keeps the first calls of each operator."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, list[Sample]] = defaultdict(list)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = self.calls[target_of(func._schema)]
        if len(found) < SAMPLES:
            found.append((func._schema, [*in_order(func, args, kwargs)]))
        return func(*args, **kwargs)


def samples() -> dict[str, list[Sample]]:
    """Calls of the operators that a file may call, by what they are called in programs."""
    from torch.testing._internal.common_methods_invocations import op_db

    recorded = Recorded()
    for function in op_db:
        dtypes = sorted(function.dtypes, key=lambda dtype: (dtype != torch.float32, str(dtype)))
        if not dtypes:
            continue
        try:
            found = [*zip(range(SAMPLES), function.sample_inputs("cpu", dtypes[0]), strict=False)]
        except Exception:  # of a package that is not there
            continue
        for _, sample in found:
            try:
                with torch.no_grad(), recorded:
                    function.op(sample.input, *sample.args, **sample.kwargs)
            except Exception:  # of other devices and packages
                continue
    return {target: calls for target, calls in recorded.calls.items() if may_be_called(target)}


def may_be_called(target: str) -> bool:
    try:
        check._operator(target)
    except ValueError:
        return False
    return True


def altered_tensor(draw: random.Random, tensor: Tensor) -> Tensor:
    axis = draw.randrange(tensor.dim()) if tensor.dim() else 0
    if not tensor.dim():
        return draw.choice([tensor.new_empty(0), tensor[None], tensor.to(draw.choice(DTYPES))])
    if draw.random() < 0.3 and tensor.dtype in (torch.int64, torch.int32) and tensor.numel():
        other = tensor.clone(memory_format=torch.contiguous_format)
        other.view(-1)[draw.randrange(tensor.numel())] = draw.choice([-1, 100, 10**6, -(10**6)])
        return other
    return draw.choice(
        [
            tensor.new_empty(0),
            tensor.new_zeros([]),
            tensor[None],
            tensor.flatten(),
            tensor.narrow(axis, 0, 0),
            tensor.narrow(axis, 0, max(0, tensor.size(axis) - 1)),
            torch.cat([tensor, tensor], axis),
            tensor.to(draw.choice(DTYPES)),
        ]
    )


def altered(draw: random.Random, given: Any, kind: str, tensors: list[Tensor]) -> Any:
    """Another argument, mostly of the same kind. kind: in the schema."""
    if isinstance(given, Tensor):
        return altered_tensor(draw, given)
    if isinstance(given, bool):
        return not given
    if isinstance(given, int):
        return draw.choice(NUMBERS)
    if isinstance(given, float):
        return draw.choice(FLOATS)
    if isinstance(given, list | tuple):
        items = [*given]
        place = draw.randrange(len(items)) if items else 0
        way = draw.randrange(4) if items else 3
        if way == 0:
            items.pop(place)
        elif way == 1:
            items.insert(place, draw.choice(items))
        elif way == 2:
            items[place] = altered(draw, items[place], kind, tensors)
        else:
            items = []
        return items
    if given is None and "Tensor" in kind and "List" not in kind and tensors:
        return draw.choice(tensors)
    if given is None and "List" not in kind and ("int" in kind or "float" in kind):
        return draw.choice(NUMBERS if "int" in kind else FLOATS)
    return given


class Writer:
    """Writes a call as a program of one step."""

    def __init__(self) -> None:
        self.steps, self.tensors = Steps(), list[Tensor]()

    def argument(self, given: Any, kind: Any) -> Any:
        name = kind.kind()
        if name == "OptionalType":
            return "none" if given is None else Some(self.argument(given, kind.getElementType()))
        if name == "ListType":
            items = given if isinstance(given, list | tuple) else [given]
            return [self.argument(item, kind.getElementType()) for item in items]
        if name == "TensorType":
            self.tensors.append(given if isinstance(given, Tensor) else torch.tensor(given))
            self.steps.inputs.append(Value())
            return self.steps.inputs[-1]
        word = word_of(given, name)
        if word is None:
            raise ValueError(f"no program writes {given}")
        return word

    def run(self, schema: Any, arguments: list[Any]) -> None:
        """Call it as a program of a file. Raises what that raises."""
        pairs = zip(arguments, schema.arguments, strict=True)
        given = [self.argument(value, each.real_type) for value, each in pairs]
        results = [Value() for _ in schema.returns]
        self.steps.steps.append(Step(target_of(schema), given, results))
        self.steps.outputs = results[:1]
        check.check(self.steps.text())
        self.steps.program()(self.tensors, [])


def shown(given: Any) -> str:
    if isinstance(given, Tensor):
        return f"{[*given.shape]} {given.dtype}"
    if isinstance(given, list | tuple):
        return f"[{', '.join(map(shown, given))}]"
    return repr(given)


def call_altered(draw: random.Random, calls: list[Sample], note: int) -> None:
    """Make calls; what is called is written to the file `note` before."""
    for _ in range(CALLS):
        schema, arguments = draw.choice(calls)
        arguments = [*arguments]
        tensors = [each for each in arguments if isinstance(each, Tensor)]
        for _ in range(draw.choice([1, 1, 1, 2, 3])):
            place = draw.randrange(len(arguments))
            kind = str(schema.arguments[place].real_type)
            arguments[place] = altered(draw, arguments[place], kind, tensors)
        os.ftruncate(note, 0)
        os.pwrite(note, ", ".join(map(shown, arguments)).encode()[:400], 0)
        try:
            Writer().run(schema, arguments)
        except (RuntimeError, ValueError, TypeError, MemoryError, OverflowError, IndexError):
            continue


def ends_by(seed: str, calls: list[Sample], note: int) -> int:
    """The signal that ended a process of calls, 0 if none did."""
    process = os.fork()
    if process:
        _, status = os.waitpid(process, 0)
        return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    try:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.alarm(HANGS)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        call_altered(random.Random(seed), calls, note)
    finally:
        os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--seconds", type=float, default=300, help="how long to look (default: 300)"
    )
    parser.add_argument("--only", default="", help="parts of names of operators, by commas")
    parser.add_argument("--part", default="1/1", help="which share of the operators")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    part, parts = map(int, options.part.split("/"))
    known = samples()
    wanted = [part for part in options.only.split(",") if part] or [""]
    names = [n for n in sorted(known) if any(w in n for w in wanted)][part - 1 :: parts]
    print(f"{len(names)} operators", flush=True)
    ends, ended, rounds = time.monotonic() + options.seconds, Counter[str](), 0
    with tempfile.TemporaryFile() as note:
        while time.monotonic() < ends:
            for name in names:
                if ended[name] >= ENOUGH or time.monotonic() > ends:
                    continue
                if number := ends_by(f"{name} {rounds}", known[name], note.fileno()):
                    ended[name] += 1
                    note.seek(0)
                    what = note.read().decode(errors="replace")
                    print(f"{signal.Signals(number).name} {name}({what})", flush=True)
            rounds += 1
    print(f"{rounds} rounds of {CALLS} calls of each; ended: {dict(ended) or 'none'}")
    sys.exit(1 if ended else 0)


if __name__ == "__main__":
    main()
