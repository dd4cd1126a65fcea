"""Environment variables of an instance: what is set, what the user's own values leave as it is."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

FOLDERS = (
    *("/usr/local/lib", "/usr/local/lib64", "/usr/lib64", "/usr/lib"),
    *("/usr/lib/x86_64-linux-gnu", "/lib64", "/lib/x86_64-linux-gnu"),
)
"""Where libraries are looked for, after the folders of the Python environment."""

ALLOCATORS = ("tcmalloc", "jemalloc")
"""In the order in which `auto` takes them."""
LIBRARIES = {
    "tcmalloc": ("libtcmalloc.so", "libtcmalloc.so.4", "libtcmalloc_minimal.so.4"),
    "jemalloc": ("libjemalloc.so", "libjemalloc.so.2"),
    "intel": ("libiomp5.so",),
}
PACKAGES = {
    "tcmalloc": "apt install libtcmalloc-minimal4, dnf install gperftools-libs or "
    "conda install gperftools",
    "jemalloc": "apt install libjemalloc2, dnf install jemalloc or conda install jemalloc",
    "intel": "pip install intel-openmp or conda install intel-openmp",
}
OPTIONS = {"tcmalloc": "--memory-allocator", "jemalloc": "--memory-allocator"}

JEMALLOC = "oversize_threshold:1,background_thread:true,metadata_thp:auto"
JEMALLOC_BENCHMARK = (
    "oversize_threshold:1,background_thread:false,metadata_thp:always,"
    "dirty_decay_ms:-1,muzzy_decay_ms:-1"
)

WATCHED = (
    *("OMP_NUM_THREADS", "OMP_PROC_BIND", "OMP_PLACES", "OMP_SCHEDULE", "OMP_WAIT_POLICY"),
    *("GOMP_CPU_AFFINITY", "GOMP_SPINCOUNT", "KMP_AFFINITY", "KMP_BLOCKTIME", "KMP_HW_SUBSET"),
    *("MKL_NUM_THREADS", "LD_PRELOAD", "MALLOC_CONF", "PYTHONUNBUFFERED"),
)
"""Variables about threads and memory: a value of the user's stays, and is named in the output."""


class MissingLibraryError(Exception):
    """A library was asked for that is not installed; the text names the packages that have it."""


@dataclass(frozen=True)
class Environment:
    """What all instances of a run get.

    allocator, openmp: the libraries that are preloaded, by their names; "default" for none.
    variables: what is set, but for OMP_NUM_THREADS, which `variables_of` adds.
    kept: values of the user's that stay.
    notes: what the user should know about the choice.
    threads: of each instance; None for as many as it has processors.
    """

    allocator: str
    openmp: str
    variables: Mapping[str, str]
    kept: Mapping[str, str]
    notes: tuple[str, ...] = ()
    threads: int | None = None

    def variables_of(self, threads: int) -> dict[str, str]:
        """The variables that are set for an instance of so many processors."""
        variables = {"OMP_NUM_THREADS": str(self.threads or threads), **self.variables}
        return {
            name: value
            for name, value in variables.items()
            if name == "LD_PRELOAD" or name not in self.kept
        }


def make_environment(
    before: Mapping[str, str],
    *,
    allocator: str = "auto",
    openmp: str = "default",
    threads: int | None = None,
    benchmark: bool = False,
    unbuffered: bool = False,
    folders: Sequence[str] | None = None,
) -> Environment:
    """Choose libraries and variables beside those of `before`, the user's own.

    allocator: "auto", "default", "jemalloc" or "tcmalloc"; openmp: "default", "intel", or "auto",
        which is Intel's where installed.
    threads: of each instance; None for as many as it has processors.
    benchmark: have jemalloc keep freed memory.
    unbuffered: have Python print each line at once.
    folders: where to look for libraries; None for the usual places.

    Raises MissingLibraryError for a library that is asked for by name and not found.
    """
    folders = _folders(before) if folders is None else folders
    notes: list[str] = []
    own = [entry for entry in before.get("LD_PRELOAD", "").replace(":", " ").split() if entry]
    loaded, allocator_name = _choose(allocator, ALLOCATORS, own, folders, notes)
    libraries = [loaded] if loaded else []
    loaded, openmp_name = _choose(openmp, ("intel",), own, folders, notes)
    libraries += [loaded] if loaded else []

    variables = {}
    if libraries:
        variables["LD_PRELOAD"] = ":".join([*own, *libraries])
    if openmp_name == "intel":
        variables["KMP_BLOCKTIME"] = "1"
    if allocator_name == "jemalloc":
        variables["MALLOC_CONF"] = JEMALLOC_BENCHMARK if benchmark else JEMALLOC
    elif benchmark:
        notes.append("--benchmark changes nothing without jemalloc")
    if unbuffered:
        variables["PYTHONUNBUFFERED"] = "1"
    kept = {name: before[name] for name in WATCHED if before.get(name)}
    return Environment(allocator_name, openmp_name, variables, kept, tuple(notes), threads)


def _choose(
    asked: str,
    choices: Sequence[str],
    preloaded: Sequence[str],
    folders: Sequence[str],
    notes: list[str],
) -> tuple[str | None, str]:
    """The library to preload, if any, and the name of what is in use."""
    for choice in choices:
        if any(_is(choice, entry) for entry in preloaded):
            if asked not in ("auto", "default", choice):
                raise MissingLibraryError(
                    f"{OPTIONS.get(asked, '--omp-runtime')}: expected no {choice} in LD_PRELOAD "
                    f"with {asked}; unset LD_PRELOAD"
                )
            return None, choice
    if asked == "default":
        return None, "default"
    for choice in choices if asked == "auto" else (asked,):
        path = find_library(choice, folders)
        if path is not None:
            return path, choice
    if asked != "auto":
        raise MissingLibraryError(
            f"{OPTIONS.get(asked, '--omp-runtime')}: {' or '.join(LIBRARIES[asked])} not found in "
            f"{', '.join(folders)}; {PACKAGES[asked]}"
        )
    if choices == ALLOCATORS:
        notes.append("neither tcmalloc nor jemalloc found: the C library's allocator")
    return None, "default"


def find_library(name: str, folders: Sequence[str]) -> str | None:
    """The path of the first library of that name in the folders; None if there is none."""
    for folder in folders:
        for file in LIBRARIES[name]:
            path = Path(folder) / file
            if path.is_file():
                return str(path)
    return None


def found_libraries(before: Mapping[str, str], names: Sequence[str]) -> list[str]:
    """Which of these libraries can be preloaded here."""
    folders = _folders(before)
    return [name for name in names if find_library(name, folders) is not None]


def _folders(environment: Mapping[str, str]) -> list[str]:
    """Folders of libraries: the Python environment's first, then the system's."""
    own = [environment.get("CONDA_PREFIX"), environment.get("VIRTUAL_ENV"), sys.prefix]
    found = [str(Path(prefix) / "lib") for prefix in own if prefix]
    home = environment.get("HOME")
    found += [str(Path(home) / ".local/lib")] if home else []
    return list(dict.fromkeys([*found, *FOLDERS]))


def _is(name: str, path: str) -> bool:
    return any(Path(path).name.startswith(file) for file in LIBRARIES[name]) or (
        name in ALLOCATORS and Path(path).name.startswith(f"lib{name}")
    )
