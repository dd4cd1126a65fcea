"""A C++ program without Python opens and runs what `oxytorch.save` wrote, and refuses the rest."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import oxytorch
from oxytorch import _library
from oxytorch.core.errors import CheckpointError

COMPILER = shutil.which("c++") or shutil.which("g++")
PACKAGE = Path(oxytorch.__file__).parent
TORCH = Path(torch.__file__).parent

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not _library.loaded, reason=f"no library: {_library.why_missing}"),
    pytest.mark.skipif(COMPILER is None, reason="no C++ compiler on PATH"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled program of tests/cpp/program."""
    made = tmp_path_factory.mktemp("cpp") / "program"
    source = Path(__file__).parents[1] / "cpp" / "program" / "main.cpp"
    assert COMPILER is not None
    command = [
        COMPILER, "-std=c++20", "-O0", "-Wall", "-Werror", str(source), "-o", str(made),
        f"-I{PACKAGE / 'include'}", "-isystem", str(TORCH / "include"),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        f"-L{TORCH / 'lib'}", f"-Wl,-rpath,{TORCH / 'lib'}", "-Wl,--no-as-needed",
        str(_library.PATH), f"-Wl,-rpath,{_library.PATH.parent}",
        "-ltorch", "-ltorch_cpu", "-lc10", "-pthread",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return made


class _Attention(nn.Module):
    """A layer of BERT, with an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 32)
        self.parts = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(2))

    def forward(self, ids: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
        x = self.words(ids)
        q, k, v = (part(x).unflatten(-1, (4, 8)).transpose(1, 2) for part in self.parts[:3])
        mask = (1 - kept[:, None, None, :]) * -1e4
        seen = F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2)
        x = self.norms[0](x + self.parts[3](seen))
        x = self.norms[1](x + self.down(F.gelu(self.up(x))))
        return x, x.mean(1)


def _convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, groups=2), nn.SiLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(8, 5),
    )  # fmt: skip


def _saved(model: nn.Module, inputs: tuple[Tensor, ...], path: Path, **options: Any) -> None:
    with torch.no_grad():
        exported = torch.export.export(model.eval(), inputs, **options)
    oxytorch.save(oxytorch.optimize(exported), path)


def _run(program: Path, *words: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [program, *words],
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        check=False,
        timeout=300,
        env={},
    )
    assert done.returncode >= 0, f"signal {-done.returncode}: {done.stdout[-300:]} {done.stderr}"
    return done


def _written(tensor: Tensor, path: Path) -> str:
    path.write_bytes(tensor.contiguous().numpy().tobytes())
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{path}:{dtype}:{','.join(map(str, tensor.shape))}"


def _compare(program: Path, model: Path, inputs: tuple[Tensor, ...], folder: Path) -> str:
    """Run both, compare the answers, and return what the C++ program printed."""
    words = [_written(tensor, folder / f"in{i}") for i, tensor in enumerate(inputs)]
    done = _run(program, "run", str(model), str(folder / "out"), *words)
    assert done.returncode == 0, done.stdout
    wanted = oxytorch.load(model)(*inputs)
    for place, own in enumerate(wanted if isinstance(wanted, tuple) else (wanted,)):
        raw = bytearray((folder / f"out.{place}").read_bytes())
        found = torch.frombuffer(raw, dtype=own.dtype).reshape(own.shape)
        torch.testing.assert_close(found, own, atol=1e-6, rtol=1e-5)
    assert "same in threads: 12" in done.stdout
    return done.stdout


def test_program_needs_no_python(program: Path) -> None:
    linked = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
    assert "liboxytorch.so" in linked
    assert "python" not in linked.replace(str(TORCH), "").replace(str(PACKAGE), "")


def test_attention_gives_the_same_with_other_sizes(program: Path, tmp_path: Path) -> None:
    batch, length = torch.export.Dim("batch"), torch.export.Dim("length", max=64)
    sizes = {0: batch, 1: length}
    inputs = torch.randint(0, 50, (2, 7)), torch.ones(2, 7)
    _saved(_Attention(), inputs, tmp_path / "model.oxy", dynamic_shapes=(sizes, sizes))
    printed = _compare(program, tmp_path / "model.oxy", inputs, tmp_path)
    assert printed.startswith("tensor ids\ntensor kept\n")
    kept = torch.ones(3, 20)
    kept[:, 12:] = 0
    _compare(program, tmp_path / "model.oxy", (torch.randint(0, 50, (3, 20)), kept), tmp_path)
    too_long = torch.randint(0, 50, (2, 70)), torch.ones(2, 70)
    words = [_written(tensor, tmp_path / f"in{i}") for i, tensor in enumerate(too_long)]
    done = _run(program, "run", str(tmp_path / "model.oxy"), str(tmp_path / "out"), *words)
    assert done.returncode == 1
    assert "expected sizes with" in done.stdout


def test_convolutions_give_the_same(program: Path, tmp_path: Path) -> None:
    model, inputs = _convolutions(), (torch.randn(2, 3, 16, 16),)
    _saved(model, inputs, tmp_path / "model.oxy")
    _compare(program, tmp_path / "model.oxy", inputs, tmp_path)
    for wrong in (torch.randn(2, 3, 16, 17), torch.randint(0, 2, (2, 3, 16, 16))):
        word = _written(wrong, tmp_path / "wrong")
        done = _run(program, "run", str(tmp_path / "model.oxy"), str(tmp_path / "out"), word)
        assert done.returncode == 1
        assert "error: expected input of shape" in done.stdout or "float32" in done.stdout
    done = _run(program, "run", str(tmp_path / "model.oxy"), str(tmp_path / "out"))
    assert "expected 1 tensors and 0 sizes, got 0 and 0" in done.stdout


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A file with most of what a file can have."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)
            self.register_buffer("count", torch.zeros(1))

        def forward(self, x: Tensor) -> dict[str, Any]:
            self.count += 1
            first, second = self.norm(self.layer(x)).split(2, -1)
            return {"a": F.gelu(first), "b": second.reshape(x.shape[0] * 2), "n": x.shape[0] * 2}

    path = tmp_path_factory.mktemp("small") / "model.oxy"
    batch = {0: torch.export.Dim("batch", max=40)}
    _saved(Model(), (torch.randn(3, 4),), path, dynamic_shapes=(batch,))
    return path.read_bytes()


def _opened(program: Path, files: list[Path], how: str = "open") -> list[str]:
    """What is said of each file; fails if the program crashed."""
    found: list[str] = []
    for begin in range(0, len(files), 200):
        done = _run(program, how, *map(str, files[begin : begin + 200]))
        found += [line.split("\t")[1] for line in done.stdout.strip("\n").split("\n")]
    assert len(found) == len(files)
    return found


def test_truncated_and_flipped_files_are_refused(
    program: Path, small: bytes, tmp_path: Path
) -> None:
    numbers = random.Random(0)
    header = 8 + int.from_bytes(small[:8], "little")
    contents = [small[: numbers.randrange(len(small))] for _ in range(150)]
    for _ in range(450):
        flipped = bytearray(small)
        flipped[numbers.randrange(header)] ^= 1 << numbers.randrange(8)
        contents.append(bytes(flipped))
    files = [tmp_path / str(place) for place in range(len(contents))]
    for file, content in zip(files, contents, strict=True):
        file.write_bytes(content)
    verdicts = _opened(program, files)
    assert all(said != "ok" for said in verdicts[:150])
    # A name of the padding, or a space, may have changed: Python opens these too.
    for file, said in zip(files[150:], verdicts[150:], strict=True):
        assert (said == "ok") is _is_opened(file), (file, said)
    assert sum(said == "ok" for said in verdicts) < 20


def _is_opened(file: Path) -> bool:
    try:
        oxytorch.load(file)
    except CheckpointError:
        return False
    return True


def test_flipped_weights_are_found_when_verified(
    program: Path, small: bytes, tmp_path: Path
) -> None:
    good, bad = tmp_path / "good", tmp_path / "bad"
    good.write_bytes(small)
    bad.write_bytes(small[:-1] + bytes([small[-1] ^ 1]))
    assert _opened(program, [good, bad], "open") == ["ok", "ok"]
    first, second = _opened(program, [good, bad], "verify")
    assert first == "ok"
    assert "to have the sha256 that was written, got another" in second


def _forged(content: bytes, change: Any) -> bytes:
    """The file with a changed description, whose checksum is right."""
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    own = header["__metadata__"]
    own["description"] = change(own["description"])
    own["sha256"] = hashlib.sha256(own["description"].encode()).hexdigest()
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % 64)
    return len(text).to_bytes(8, "little") + text + content[8 + length :]


def test_forged_descriptions_are_judged_as_python_judges_them(
    program: Path, small: bytes, tmp_path: Path
) -> None:
    numbers = random.Random(1)
    words = ["%0", "%1", "%99", "$0", "$7", "-1", "0", "none", "some", "[", "]", "true", "=float32",
             "aten::mm", "aten::from_file", "aten::add_.Tensor", "oxytorch::rms_norm", "1.0",
             '\\"none\\"', "size", "add", "/", "aten::gelu", "9" * 20, "nan"]  # fmt: skip

    def change(text: str) -> str:
        parts = text.split(" ")
        for _ in range(numbers.randrange(1, 3)):
            place, how = numbers.randrange(len(parts)), numbers.randrange(5)
            if how < 3:
                parts[place] = numbers.choice(words)
            elif how == 3:
                other = numbers.randrange(len(parts))
                parts[place], parts[other] = parts[other], parts[place]
            else:
                del parts[place]
        return " ".join(parts)

    files = [tmp_path / str(place) for place in range(600)]
    for file in files:
        file.write_bytes(_forged(small, change))
    verdicts = _opened(program, files)
    for file, said in zip(files, verdicts, strict=True):
        assert (said == "ok") is _is_opened(file), (file, said)
    assert 0 < sum(said == "ok" for said in verdicts) < 200


def test_messages_name_what_is_wrong(program: Path, small: bytes, tmp_path: Path) -> None:
    cases = {
        "expected a file, found none": None,
        "a newer oxytorch may read it": small.replace(b'"version": "3"', b'"version": "9"'),
        "a file may not call aten::from_file": _forged(
            small, lambda text: text.replace("aten::split_with_sizes", "aten::from_file", 1)
            if "aten::split_with_sizes" in text else text.replace("aten::gelu", "aten::from_file")
        ),
        "of another kind": b"\xff" * 64,
    }  # fmt: skip
    files = []
    for place, content in enumerate(cases.values()):
        files.append(tmp_path / str(place))
        if content is not None:
            files[-1].write_bytes(content)
    for part, said in zip(cases, _opened(program, files), strict=True):
        assert part in said


class _Packed(nn.Module):
    """Layers whose weights lie in panels."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.depth = nn.Conv2d(3, 32, 3), nn.Conv2d(32, 32, 3, groups=32)
        self.out = nn.Linear(32, 1024)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.out(F.relu(self.depth(F.relu(self.image(x)))).mean((2, 3))))


@pytest.fixture
def packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packing_pays: Callable[..., None]
) -> Path:
    monkeypatch.setattr("oxytorch.rewriting.measure.TIMED", False)
    packing_pays(True, own=True)
    path = tmp_path / "packed.oxy"
    oxytorch.save(_Packed().eval(), path, sample_input=torch.randn(2, 3, 8, 8))
    return path


def test_packed_weights_are_read_from_the_file(program: Path, packed: Path, tmp_path: Path) -> None:
    text = str(oxytorch.load(packed))
    for name in ("linear_panels", "convolution_panels", "depthwise_convolution"):
        assert f"oxytorch::{name} " in text
    _compare(program, packed, (torch.randn(2, 3, 8, 8),), tmp_path)
    first = packed.read_bytes().replace(b'"version": "3"', b'"version": "1"')
    packed.write_bytes(first)
    assert _opened(program, [packed]) == ["ok"]


def test_packed_weights_of_another_size_are_never_read(
    program: Path, packed: Path, tmp_path: Path
) -> None:
    content, word = packed.read_bytes(), _written(torch.randn(2, 3, 8, 8), tmp_path / "x")
    lines = str(oxytorch.load(packed)).split("\n")
    numbers, forged = random.Random(0), tmp_path / "forged.oxy"
    steps = [
        line for line in lines if (" = oxytorch::" in line and "[" in line) or "_panels" in line
    ]
    refused = 0
    for _ in range(40):
        step = numbers.choice(steps)
        words = step.split(" ")
        places = [place for place, each in enumerate(words) if each.isdigit()]
        words[numbers.choice(places)] = str(numbers.choice([0, 2, 5, 1 << 29, 1 << 31, 1 << 62]))
        change = json.dumps(step)[1:-1], json.dumps(" ".join(words))[1:-1]
        forged.write_bytes(_forged(content, lambda text, change=change: text.replace(*change)))
        done = _run(program, "run", str(forged), str(tmp_path / "out"), word)
        refused += done.returncode
        assert done.returncode == 0 or done.stdout.startswith("error: ")
    assert refused > 20

    def shuffled(text: str) -> str:
        description = json.loads(text)
        numbers.shuffle(description["constants"])
        return json.dumps(description)

    for _ in range(10):
        forged.write_bytes(_forged(content, shuffled))
        _run(program, "run", str(forged), str(tmp_path / "out"), word)  # which fails if it crashes
