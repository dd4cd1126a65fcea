"""Programs of the calls of one module: those that differ in sizes alone share one."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.interruption import pass_on_interruption
from ..core.modes import own_code
from ..graph.agreement import TOLERANCE, difference
from ..graph.errors import CaptureError
from .calls import Form, Recording, form_of
from .inputs import ModuleCall, without_sizes
from .outputs import OutputStructure, output_tensors
from .passes.quantized_layers import Quantized
from .placed import Placed, UnsettledError
from .proof import conditions_of
from .recorded import OutputForm, RecordedProgram, Run, forms_of
from .sizes import DifferentError, SizedRun, share_externals
from .symbols import Symbols
from .tape import recorded_again, recorded_once
from .way import Way, new_way, what_hides_ways

_log = logging.getLogger(__name__)

MOST_OWN = 5
"""Programs that share nothing, since each holds packed weights of its own."""
MOST_PROOFS, MOST_FAILED = 2, 4
"""Runs of which a proof for all sizes is tried, and how many may fail one after the other: each
takes as long as tens of calls or more."""
MOST_RUNS = 4
"""Runs of which formulas are made."""
MOST_TEXTS = 8
"""Conditions that are put in words."""
_PLACE = re.compile(r"^\S+\.(cpp|h):\d+: ")
"""The line of torch's C++ code that some of its errors begin with."""
_LARGEST = TOLERANCE[torch.bfloat16]
"""By how much a recorded run may differ from one that is not: by rounding, in whichever dtype."""


@dataclass(frozen=True)
class Seen:
    """What runs of a module's own code gave before a program is made of it.

    recording: of one of them; was_watched: whether torch's functions were watched in it.
    output, forms: what another one returned, and the forms of the tensors in it; nothing but a look
        at its code went with that: under modes torch's fast paths are left out, and strides differ.
    """

    recording: Recording
    output: Any
    forms: list[Form]
    was_watched: bool = False


class Served(NamedTuple):
    """A run of a module's own code, and a program that serves such calls.

    family: whose program it is; way: the run's, where a proof for all sizes is wanted.
    """

    output: Any
    program: RecordedProgram | None = None
    family: _Family | None = None
    way: Way | None = None


class Programs:
    """Records calls of a module and makes programs of them.

    From the second one on, calls that differ in sizes alone share a program, with one copy of
    packed weights. It serves a further call if that run, which is recorded too, is one that the
    program stands for, or without a run, if there is a proof for its sizes. oneDNN packs weights of
    convolutions for the sizes of their images: modules with such weights get programs of their own
    for their first sizes, which all batches share.

    quantized: the layers that are to multiply bytes.
    seconds: those of the first call of the last program that was built.
    """

    def __init__(self, quantized: Quantized | None = None) -> None:
        self.seconds = 0.0
        self._quantized = quantized
        self._families: list[_Family] = []
        self._failed = 0  # proofs, since one was found
        self._is_plain = True  # whether recorded runs take the ways of others

    def build(
        self, forward: Callable[..., Any], call: ModuleCall, seen: Seen
    ) -> tuple[RecordedProgram, Any]:
        """The program of such calls, and the output of this one. Raises CaptureError."""
        inputs = call.tensors

        def run_once() -> tuple[Any, list[Tensor]]:
            output = forward(*call.args, **call.kwargs)
            return output, output_tensors(output)

        with own_code():
            recording, is_plain = recorded_again(seen.recording, run_once, inputs, seen.was_watched)
        if not recording.tensors:
            raise CaptureError("it returns no tensor")
        if any(tensor.requires_grad for tensor in recording.tensors):
            raise CaptureError("its output asks for gradients: a view of a weight, for example")
        if difference(seen.output, recording.output) > _LARGEST:
            raise CaptureError("its code gives other values while it is recorded")
        run = Run(recording, inputs, self._quantized)
        plain = [form[:3] for form in seen.forms]
        self._is_plain &= is_plain and plain == _forms(recording.tensors)
        program = RecordedProgram(*self._placed(run), plain)
        found, self.seconds = program.first_call(inputs)
        if found is None:
            raise CaptureError("a second run of its operators gives other values")
        if _forms(found) != plain:
            raise CaptureError("the program gives tensors of another form")
        return program, recording.output

    def served(
        self,
        forward: Callable[..., Any],
        call: ModuleCall,
        joins: Callable[[], bool] | None = None,
    ) -> Served | None:
        """Run `forward` once, and look for a program of other sizes that serves such calls.

        joins: asked after the run whether a program that has served one size so far may become one
        for such calls too. None, with nothing run, where there is no program that might.
        """
        inputs = call.tensors
        if not self._is_plain or not any(
            family.may_serve(inputs) or (joins and family.may_join) for family in self._families
        ):
            return None

        hidden = what_hides_ways()
        may_prove = self._failed < MOST_FAILED
        wanting = [family for family in self._families if may_prove and family.wants_proof]
        for each in wanting:
            each.unproven = hidden or each.unproven
        way = new_way() if wanting and not hidden else None

        def run_once() -> Any:
            with nullcontext() if way is None else way.watching():
                return forward(*call.args, **call.kwargs)

        output, recording = recorded_once(run_once, output_tensors, inputs)
        if isinstance(recording, CaptureError) or any(
            tensor.requires_grad for tensor in recording.tensors
        ):
            return Served(output)
        run = Run(recording, inputs, self._quantized)
        try:
            family = self._serving(run)
            if family is None and joins and joins():
                joined = (own for own in self._families if _joins(own, run, recording, inputs))
                family = next(joined, None)
        except Exception as error:  # the model's code has run: its output is the answer
            pass_on_interruption(error)
            _log.info("calls of new sizes are not served: %s: %s", type(error).__name__, error)
            return Served(output)
        if family is None or family.placed is None:
            return Served(output)
        forms = _forms(recording.tensors)
        program = RecordedProgram(family.placed, family.externals, forms)
        return Served(output, program, family, way)

    def prove(
        self, served: Served, forward: Callable[..., Any], call: ModuleCall, output: OutputStructure
    ) -> list[Placed]:
        """Have the program that served a call serve others of such sizes without a run, if that it
        is right for them can be proven. forward: the module's own code; output: what it gave.

        Returns the programs that are not needed any more, each with packed weights of its own.
        """
        family = served.family
        if family is None or served.way is None or not family.wants_proof:
            return []
        if served.way.unseen:
            family.unproven = served.way.unseen
            return []
        with own_code():
            family.prove(forward, call, output, served.way)
        self._failed = self._failed + 1 if family.proof is None else 0
        return family.superseded()

    def proven(
        self, form: Hashable, tensors: Sequence[Tensor]
    ) -> list[tuple[RecordedProgram, OutputStructure]]:
        """The programs for calls of a form, with such tensors, and what they return, that are
        proven to be right. Several differ in what the module's code read of its input."""
        proofs = [family.proof for family in self._families if family.proof is not None]
        if not proofs:
            return []
        inputs, kind = forms_of(tensors), without_sizes(form)
        return [
            (RecordedProgram(proof.placed, proof.externals, outputs), proof.output)
            for proof in proofs
            if (outputs := proof.outputs(kind, inputs)) is not None
        ]

    def in_words(self) -> list[str]:
        """For each program, in words: which sizes it serves, and why no others."""
        return [family.in_words() for family in self._families]

    def _serving(self, run: Run) -> _Family | None:
        """The calls of other sizes whose program stands for a run. Raises CaptureError."""
        return next((family for family in self._families if family.serves(run)), None)

    def _placed(self, run: Run) -> tuple[Placed, Sequence[Tensor]]:
        """A program of a run, and the tensors from outside that it takes. Raises CaptureError."""
        serving = self._serving(run)
        if serving is not None and serving.placed is not None:
            return serving.placed, serving.externals
        is_full = len(self._families) >= MOST_OWN
        for family in self._families:
            if family.is_open_to(run) and (is_full or family.shares_packed(run)):
                placed = family.joined(run)
                if placed is not None:
                    return placed, family.externals
        if is_full:
            raise CaptureError(f"there are programs for {MOST_OWN} other kinds of call")
        placed = run.placed()
        self._families.append(_Family(run, placed.packs_by_size))
        return placed, run.externals


class Proof(NamedTuple):
    """That a program is right for calls of all sizes that `symbols` allow.

    kind: the form of such calls, without sizes.
    output: what they return.
    """

    sized: SizedRun
    symbols: tuple[Symbols, Symbols]
    placed: Placed
    externals: Sequence[Tensor]
    output: OutputStructure
    kind: Hashable

    def outputs(self, kind: Hashable, inputs: Sequence[Form]) -> list[OutputForm] | None:
        """The forms of the tensors that such a call gives; None where it is not proven."""
        sizes = self.sized.sizes_of(inputs) if kind == self.kind else None
        if sizes is None or not self.sized.takes(inputs, sizes):
            return None
        if not all(symbols.allow(sizes) for symbols in self.symbols):
            return None
        return self.sized.outputs(sizes)


class _Family:
    """Runs that differ in sizes alone; placed: the program that they share, once there are two.

    packs_by_size: whether that of the first run alone has weights packed for its sizes.
    externals: the tensors that it takes besides those of the call. Constants among them are those
    of the first run, so that values that are made of them are made once.
    """

    def __init__(self, run: Run, packs_by_size: bool) -> None:
        self.placed: Placed | None = None
        self._former: list[Placed] = []
        self._packs_by_size = packs_by_size
        self.unproven = ""  # why there is no proof
        self._alone = ""  # why a run was not joined to it
        self.externals = run.externals
        self._runs = [run]
        self._sized: Sequence[SizedRun] = ()
        self._symbols: Symbols | None = None
        self.proof: Proof | None = None
        self._proofs = 0  # tried

    @property
    def wants_proof(self) -> bool:
        """Whether it is to be proven that the program serves all sizes that meet conditions."""
        is_level = len(self._sized) == 1 or self.may_join
        return self.proof is None and self._proofs < MOST_PROOFS and is_level

    def prove(
        self, forward: Callable[..., Any], call: ModuleCall, output: OutputStructure, way: Way
    ) -> None:
        """Look for a proof, of a run of this call."""
        self._proofs += 1
        (sized,) = self._sized
        try:
            found, settled = conditions_of(sized, forward, call, output, way)
            if settled is not sized:
                self._settle(settled, found, call.tensors)
        except Exception as error:  # of torch too, where it knows no form of a result
            pass_on_interruption(error)
            first = _PLACE.sub("", str(error).partition("\n")[0])
            self.unproven = f"{type(error).__name__}: {first}"
            _log.info("each new size runs the model's code once: %s", self.unproven)
            return
        assert self._symbols is not None and self.placed is not None
        kind, given = without_sizes(call.form), (self._sized[0], (self._symbols, found))
        self.proof = Proof(*given, self.placed, self.externals, output, kind)

    def _settle(self, sized: SizedRun, found: Symbols, inputs: list[Tensor]) -> None:
        """Take a program of other formulas, which a run on symbols computed. Raises CaptureError
        where they are not those of all runs that `found` allows."""
        for run in self._runs:
            sizes = sized.sizes_of(run.forms[0])
            if sizes is None or not found.allow(sizes):
                continue  # it goes another way, and keeps a program of its own
            if not sized.is_of(run.recordings[0], run.forms[0], sizes):
                raise CaptureError("where sizes are symbols, its code computes other ones")
        sizes = sized.sizes_of(forms_of(inputs))
        assert sizes is not None and self.placed is not None
        symbols = Symbols(sizes)
        placed = self._runs[-1].sized(sized, symbols)
        before, after = (p([*inputs, *self.externals]) for p in (self.placed, placed))
        if not symbols.allow(sizes) or difference(before, after) > _LARGEST:
            raise CaptureError("a program of other formulas gives other values")
        self._take(placed)
        self._sized, self._symbols = [sized], symbols

    def _take(self, placed: Placed) -> None:
        if self.placed is not None:
            self._former.append(self.placed)
        self.placed = placed

    def superseded(self) -> list[Placed]:
        """The programs in whose place calls can take the one that was proven since."""
        if self.proof is None:
            return []
        found, self._former = self._former, []
        return found

    def in_words(self) -> str:
        """Which sizes it serves, and why no others."""
        if self.proof is not None:
            return f"checked for other sizes: new ones run at once{self._conditions(self.proof)}"
        if self.placed is None:
            why = f"; another size was not joined: {self._alone}" if self._alone else ""
            return f"serves one size{why}"
        if len(self._sized) != 1:
            why = "its operators had to be taken apart"
        else:
            why = self.unproven or "the check is made at the next one"
        return f"not checked for other sizes, each new one runs the model's code once: {why}"

    def _conditions(self, proof: Proof) -> str:
        places = proof.sized.places
        texts = [*dict.fromkeys(text for own in proof.symbols for text in own.texts(places))]
        more = f" and {len(texts) - MOST_TEXTS} more" if len(texts) > MOST_TEXTS else ""
        return f", if {', '.join(texts[:MOST_TEXTS])}{more}" if texts else ""

    @property
    def may_join(self) -> bool:
        """Whether it has served one size so far, and may serve others."""
        return self.placed is None

    def is_open_to(self, run: Run) -> bool:
        """Whether a program of its runs and another one may be found. What is proven is other where
        its conditions do not hold, but may take sizes as known that others have other values of."""
        if self.proof is None:
            return True
        sizes = self.proof.sized.sizes_of(run.forms[0])
        return sizes is None or not self.proof.sized.takes(run.forms[0], sizes)

    def shares_packed(self, run: Run) -> bool:
        """Whether weights that are packed for its runs are packed for a run, too."""
        return not self._packs_by_size or self._runs[-1].images == run.images

    def may_serve(self, inputs: Sequence[Tensor]) -> bool:
        """Whether the program may stand for calls with such inputs."""
        return self._sizes_of(forms_of(inputs)) is not None

    def _sizes_of(self, inputs: Sequence[Form]) -> list[int] | None:
        """The sizes of such inputs, if the program allows them."""
        if self._symbols is None:
            return None
        sizes = self._sized[0].sizes_of(inputs)
        return sizes if sizes is not None and self._symbols.allow(sizes) else None

    def serves(self, run: Run) -> bool:
        """Whether the program stands for a run. Raises CaptureError."""
        sizes = self._sizes_of(run.forms[0])
        if sizes is None or not share_externals(self._runs[0].recordings[0], run.recordings[0]):
            return False
        if not self._sized[0].is_of(run.recordings[0], run.forms[0], sizes):
            return False
        if len(self._sized) == 1:
            return True
        run.reduce()
        return (
            len(run.recordings) == len(self._sized)
            and self._sized[1].is_of(run.recordings[1], run.forms[1], sizes)
            and share_externals(self._runs[0].recordings[1], run.recordings[1])
        )

    def joined(
        self, run: Run, accepts: Callable[[Placed, Sequence[Tensor]], bool] = lambda *given: True
    ) -> Placed | None:
        """A program of the runs so far and another one; None where they differ in more than sizes,
        or where it is not accepted, which is asked with it and the tensors that it takes.

        Raises CaptureError.
        """
        self._alone = ""
        run.reduce()
        runs = [*self._runs, run]
        levels = range(len(run.recordings))
        alike = all(
            len(other.recordings) == len(levels)
            and all(share_externals(other.recordings[n], run.recordings[n]) for n in levels)
            for other in self._runs
        )
        if not alike:
            self._alone = "it takes other tensors, or other operators that are taken apart"
            return None
        try:
            sized = [
                SizedRun([r.recordings[n] for r in runs], [r.forms[n] for r in runs], run.count)
                for n in levels
            ]
            sizes = sized[0].sizes_of(run.forms[0])
            assert sizes is not None
            symbols = Symbols(sizes)
            placed = run.sized(sized[-1], symbols)
        except (DifferentError, CaptureError) as error:
            self._alone = str(error)
            return None
        if not symbols.allow(sizes) or not accepts(placed, self.externals):
            self._alone = "the program of both does not give what the model gives"
            return None
        self._take(placed)
        self._sized, self._symbols = sized, symbols
        self.proof, self._proofs = None, 0
        self._runs = [runs[0], *runs[1:][-MOST_RUNS + 1 :]]
        return placed


def _joins(family: _Family, run: Run, recording: Recording, inputs: list[Tensor]) -> bool:
    """Have the program of one size stand for those of a run too, if it gives what the run gave."""
    forms = _forms(recording.tensors)

    def accepts(placed: Placed, externals: Sequence[Tensor]) -> bool:
        try:
            found = RecordedProgram(placed, externals, forms)(inputs)
        except UnsettledError:  # it takes tensors of inference mode, which tell of no writes
            return False
        return (
            found is not None
            and _forms(found) == forms
            and difference(recording.tensors, found) <= _LARGEST
        )

    may_join = family.may_join and family.shares_packed(run)
    return may_join and family.joined(run, accepts) is not None


def _forms(tensors: Sequence[Tensor]) -> list[OutputForm]:
    """The shapes, strides and dtypes of tensors."""
    return [form_of(tensor)[:3] for tensor in tensors]
