"""The `oxytorch memory` subcommand: what a program allocates, and what allocators make of it."""

from __future__ import annotations

import argparse
import runpy
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..command_line import positive, report_errors, tell, why_no_picture, words
from ..core.whole_file import check_destination
from . import plots
from . import trace as traces
from .advise import Advice, advise
from .record import MOST_EVENTS, MemoryRecording, record
from .replay import MOST_MEMORY, NAMES, STANDARD, Result, replay, write_json
from .sizes import parse, size
from .trace import Trace

DESCRIPTION = """\
Record what a program allocates on a GPU, and replay it through allocators, on any machine.

A replay says how much memory an allocator would have reserved for what the program needs, and how
often it would have called the driver. It needs no GPU."""

EXAMPLES = """\
examples:
  oxytorch memory record run.trace train.py --epochs 1    run a script, record its allocations
  oxytorch memory show run.trace                          what it holds, and which lines hold most
  oxytorch memory replay run.trace                        torch's allocators, ours, and the bound
  oxytorch memory replay run.trace --plot run.svg         with a picture
  oxytorch memory replay run.trace --limit 24GiB          would it fit a smaller GPU?
  oxytorch memory advise run.trace                        which setting, or which allocator

in a program:
  with oxytorch.memory.record("run.trace") as recording:
      for step, batch in enumerate(batches):
          recording.mark(f"step {step}")
          ...

A pickle that torch.cuda.memory._dump_snapshot wrote is taken in place of a trace; none of its code
is run. docs/memory_traces.md says how numbers are counted."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Gives the parser its options."""
    parser.description, parser.epilog = DESCRIPTION, EXAMPLES
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    _configure_record(verbs.add_parser("record", help="run a script and record its allocations"))
    shows = _reader(verbs, "show", "what a trace holds, and who holds most at its peak")
    shows.add_argument(
        "--top", type=positive, default=10, metavar="N", help="lines of code to list"
    )
    replays = _reader(verbs, "replay", "serve a trace by several allocators")
    replays.add_argument(
        "--allocators",
        default=",".join(STANDARD),
        metavar="LIST",
        help=f"of {', '.join(NAMES)}, and settings of PYTORCH_ALLOC_CONF such as "
        "max_split_size_mb:128, separated by commas (default: %(default)s)",
    )
    _limit(replays)
    replays.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers as JSON")
    replays.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw timelines and maps (.svg, .png)"
    )
    _limit(_reader(verbs, "advise", "which setting of PYTORCH_ALLOC_CONF, or which allocator"))


def _configure_record(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", type=Path, metavar="TRACE", help="the file to write")
    parser.add_argument("script", metavar="SCRIPT", help="a Python script")
    rest = parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="ARGUMENTS", help="arguments of the script"
    )
    # Of what argparse says to be missing where there is no script.
    rest.required = False
    parser.usage = (
        "%(prog)s [--device N] [--no-stacks] [--max-events N] TRACE SCRIPT [ARGUMENTS ...]\n"
        "example: oxytorch memory record run.trace train.py --epochs 1"
    )
    parser.add_argument("--device", type=int, metavar="N", help="the CUDA device (default: 0)")
    parser.add_argument(
        "--no-stacks", action="store_true", help="do not record which line of code allocates"
    )
    parser.add_argument(
        "--max-events",
        type=positive,
        default=MOST_EVENTS,
        metavar="N",
        help="most events to keep; earlier ones are dropped (default: %(default)s)",
    )


def _reader(verbs: Any, name: str, text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = verbs.add_parser(name, help=text, description=text)
    parser.add_argument("trace", type=Path, metavar="TRACE", help="a trace, or torch's snapshot")
    parser.add_argument(
        "--device", type=int, metavar="N", help="device to read from a snapshot of several"
    )
    return parser


def _limit(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--limit",
        type=_bytes,
        metavar="SIZE",
        help="memory of the device, such as 24GiB; a K is 1024 bytes, with or without the i "
        "(default: that of the recorded device)",
    )


def _bytes(text: str) -> int:
    try:
        found = parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if found < 1 << 20:
        raise argparse.ArgumentTypeError(
            f"expected at least 1MiB, got {text} ({size(found)}); give a unit, such as 24GiB"
        )
    if found > MOST_MEMORY:
        raise argparse.ArgumentTypeError(f"expected at most {size(MOST_MEMORY)}, got {text}")
    return found


def run(arguments: argparse.Namespace) -> int:
    """Does what is asked; 1 if the recorded script failed, 2 if the command could not be done."""
    verbs = {"record": _record, "show": _show, "replay": _replay, "advise": _advise}
    return report_errors(
        "memory",
        lambda: verbs[arguments.verb](arguments),
        dict.fromkeys((ValueError, RuntimeError, OSError), 2),
    )


def _record(arguments: argparse.Namespace) -> int:
    script = arguments.script
    if not Path(script).is_file():
        raise ValueError(f"record: there is no script {script}")
    sys.argv = [script, *arguments.arguments]
    sys.path.insert(0, str(Path(script).absolute().parent))
    recording, ended = MemoryRecording(), None
    try:
        with record(
            arguments.trace,
            device=arguments.device,
            stacks=not arguments.no_stacks,
            max_events=arguments.max_events,
        ) as recording:
            try:
                runpy.run_path(script, run_name="__main__")
            except BaseException as error:
                ended = error
                raise
    except Exception as error:
        if error is not ended:
            raise
        traceback.print_exc()
    finally:
        if recording.trace is not None:
            tell(f"{arguments.trace}: {_what(recording.trace)}")
    return 0 if ended is None else 1


def _what(trace: Trace) -> str:
    found = traces.peak(trace)
    return (
        f"{len(trace)} events, {len(trace.sizes)} allocations, {size(found.allocated)} at the peak"
    )


def _show(arguments: argparse.Namespace) -> int:
    trace = traces.load_trace(arguments.trace, arguments.device)
    about, found = trace.about, traces.peak(trace)
    tell(f"{arguments.trace}: {_what(trace)}")
    rows = [
        ("program", about.program),
        ("device", _device(trace)),
        ("torch", about.torch),
        ("settings", about.settings),
        ("held at the start", size(about.initial_bytes) if about.initial_bytes else ""),
        ("lost", f"the first {about.lost} allocations" if about.lost else ""),
        ("peak allocated", f"{size(found.allocated)}, after event {found.event}"),
        ("in use by streams", size(found.active) if found.active > found.allocated else ""),
        ("torch reserved", size(about.peak_reserved) if about.peak_reserved else ""),
        ("streams and pools", str(len(trace.queue_list))),
        ("marks", f"{len(trace.marks)}, the last {trace.marks[-1][1]!r}" if trace.marks else ""),
    ]
    for name, value in rows:
        if value:
            tell(f"  {name:<18} {value}")
    print("\nheld at the peak by")
    for held, count, site in traces.holders(trace, arguments.top):
        tell(f"  {size(held):>12}  in {count:>6}  {site}")
    return 0


def _device(trace: Trace) -> str:
    about = trace.about
    memory = f", {size(about.total_memory)}" if about.total_memory else ""
    return f"{about.device}{memory}" if about.device else ""


def _replay(arguments: argparse.Namespace) -> int:
    reason = why_no_picture(arguments.plot, "bench") if arguments.plot else ""
    if reason:
        raise ValueError(f"--plot: {reason}")
    names = words(arguments.allocators)
    if not names:
        raise ValueError(f"--allocators: expected some of {', '.join(NAMES)}")
    for option, target in (("--json", arguments.json), ("--plot", arguments.plot)):
        _check_target(option, target, arguments.trace)
    trace = traces.load_trace(arguments.trace, arguments.device)
    results = replay(trace, names, _limit_of(arguments, trace))
    tell(f"{arguments.trace}: {_what(trace)}")
    print("\n".join(table(results)))
    for line in _recorded(trace, results):
        print(line)
    if arguments.json:
        write_json(results, trace, arguments.json)
    if arguments.plot:
        title = f"{arguments.trace.name}: {_what(trace)}"
        plots.draw(trace, results, title, arguments.plot)
    return 0


def _check_target(option: str, target: Path | None, trace: Path) -> None:
    """Before the work, whether its result can be written."""
    if target is None:
        return
    try:
        check_destination(target, trace)
    except OSError as error:
        raise ValueError(f"{option}: {error}") from error


def _limit_of(arguments: argparse.Namespace, trace: Trace) -> int | None:
    limit: int | None = arguments.limit or trace.about.limit or trace.about.total_memory
    return limit


def table(results: Sequence[Result]) -> list[str]:
    """The numbers of several allocators, one a line."""
    rows = [["allocator", "reserved", "not used", "driver calls", "ns a call", ""]]
    for result in results:
        time = "-" if result.nanoseconds is None else f"{result.nanoseconds:.0f}"
        note = "" if result.failed is None else f"out of memory at event {result.failed}"
        part = f"{result.fragmentation:.1%}" if result.failed is None else "-"
        calls = str(result.driver_calls) if result.calls else "-"
        rows.append([result.allocator, size(result.peak_reserved), part, calls, time, note])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if column in (0, 5) else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _recorded(trace: Trace, results: Sequence[Result]) -> list[str]:
    """How far a replay is from what torch reserved while it was recorded."""
    reserved, about = trace.about.peak_reserved, trace.about
    name = "expandable" if about.is_expandable else "native-policy"
    own = next((result for result in results if result.allocator == name), None)
    if not reserved or own is None or own.failed is not None:
        return []
    difference = own.peak_reserved / reserved - 1
    return [f"torch itself reserved {size(reserved)}; the replay of {name}: {difference:+.2%}"]


def _advise(arguments: argparse.Namespace) -> int:
    trace = traces.load_trace(arguments.trace, arguments.device)
    found = advise(trace, _limit_of(arguments, trace))
    tell(f"{arguments.trace}: {_what(trace)}")
    print("\n".join(table(found.results)))
    print()
    print("\n".join(_advice(found)))
    return 0


def _advice(found: Advice) -> list[str]:
    lines = [*found.reasons]
    if not found.fits:
        return [*lines, "advice: a smaller batch or shorter inputs; no allocator serves this here"]
    if found.ours:
        lines.append('advice: oxytorch.memory.use("cuda") before the first allocation')
    if found.setting:
        instead = "without oxytorch: " if found.ours else "advice: "
        lines.append(f"{instead}PYTORCH_ALLOC_CONF={found.setting}")
    elif not found.ours:
        lines.append("advice: leave torch's defaults as they are")
    return lines
