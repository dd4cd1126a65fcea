"""The forward that runs a captured program of a whole module where its guards hold.

Calls that run programs, that are looked at and that are recorded share one lock and the same
tables, so they are one file. What needs none of these is in eligible, looks, patience and families.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..core.interruption import pass_on_interruption
from ..core.modes import is_plain_inference, is_traced_by_proxies, own_code
from ..core.sources import MISSING
from ..graph.code import can_watch
from ..graph.errors import CaptureError
from ..graph.forward import AroundForward
from ..graph.state import State
from ..rewriting import measure, turns
from .before import Before
from .calls import Form, Recording
from .codes import Codes
from .eligible import HELD, SPECIAL, ParameterWatch, is_special
from .families import Programs, Seen
from .inputs import ForeignError, ModuleCall, form_of_call
from .looks import CHANGES, KNOWN_ARGUMENTS, Look, forms_of_output, in_words
from .outputs import OutputStructure, containers, output_tensors
from .passes.quantized_layers import Layers
from .patience import Patience
from .placed import Placed, UnsettledError
from .reachable import Reachable
from .recorded import RecordedProgram
from .tape import recorded_once

MOST_FORMS = 512
"""Input signatures that programs serve; calls with others run the module's own code."""
MOST_SEEN = 1024
"""Input signatures that are counted."""
MOST_LOOKS = 16
"""Forms whose first call's end is kept until their second one."""
MOST_PROGRAMS = 4
"""Programs of one form: they differ in what the module's code read from its input."""
MOST_MISSES = 16
"""Calls in a row in which no program of a form holds, upon which it is given up."""


class Replay(AroundForward):
    """Stands in for `module.forward`: runs a program where its guards hold, else the forward.

    The guards: nothing that the module's Python can have read is another than it was (see
    `Reachable`), the call is plain inference (no gradient can be asked for, no autocast, tracing or
    tensor mode is active) and has the form (shapes, dtypes, strides, constants) of a program. A new
    form is captured when it is seen for the second time.

    layers: those that multiply bytes.
    must_gain: whether programs go that take longer than the module's own code.
    """

    layers: Layers | None = None
    must_gain = False

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._start()

    def _start(self) -> None:
        self._lock = threading.Lock()
        self._builder = self._new_builder()
        self._programs: dict[Hashable, list[tuple[RecordedProgram, OutputStructure]]] = {}
        self._refused: dict[Hashable, str] = {}
        self._seen: dict[Hashable, int] = {}
        self._misses: dict[Hashable, int] = {}
        self._before: dict[Hashable, Look] = {}  # what a form's first call left behind
        self._patience = Patience()
        self._state: Reachable | None = None
        self._codes = Codes()
        self.watch = ParameterWatch(self.module)
        self.latest = ""  # why the latest call that had no program, nor was refused one, had none

    def _new_builder(self) -> Programs:
        return Programs()

    def prepare(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], written: State | None = None
    ) -> tuple[float, float]:
        """Capture calls of this form now. Raises CaptureError with the reason where it cannot.

        written: what is to keep that which a first run writes to. Returns the seconds of a run of
        the module's own code that nothing went with, and those of the program's first call.
        """
        try:
            call = ModuleCall.of(args, kwargs)
        except ForeignError as error:
            raise CaptureError(str(error)) from None
        self.check_plain()
        self.watch.begin()
        with torch.no_grad(), self._in_place():
            try:
                try:
                    seconds = self._prepared(call, written)
                except CaptureError:  # what is made at the first call may be refused, or be new
                    seconds = self._prepared(call, None)
                if self.must_gain:
                    self._refuse_loss(call)
                return seconds
            except CaptureError:
                raise
            except Exception as error:
                pass_on_interruption(error)
                first = str(error).strip().partition("\n")[0]
                raise CaptureError(f"it fails, {type(error).__name__}: {first}") from error

    def _prepared(self, call: ModuleCall, written: State | None) -> tuple[float, float]:
        """Add a program, of a run that is watched, one that nothing goes with, which is timed, and
        one that is looked on. Raises CaptureError, and what the module's code raises."""
        with self._lock:
            with nullcontext() if written is None else written.watching():
                _, recording, codes = self._run_once(call, looks_on=False)
            if isinstance(recording, CaptureError):
                raise recording
            state, before = Reachable(self.module, codes), Before(self.module, call)
            with own_code():
                began = time.perf_counter()
                value = self.forward(*call.args, **call.kwargs)
                seconds = time.perf_counter() - began
            forms = self._watched(codes, call) if self._stands_in() else forms_of_output(value)
            if not (state.is_current() and before.holds() and call.has_kept_its_form()):
                raise CaptureError("its code writes to its input or keeps a state")
            self._add(call, Seen(recording, value, forms, was_watched=True), codes, state)
            return seconds, self._builder.seconds

    def programs(self) -> list[RecordedProgram]:
        """The programs captured so far."""
        return [program for known in self._programs.values() for program, _ in known]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not is_plain_inference() or self.module.training:
            return self._run_stock(args, kwargs)
        began = time.perf_counter()
        try:
            form, tensors = form_of_call(args, kwargs)
        except ForeignError as error:
            self.latest = str(error)
            return self.forward(*args, **kwargs)
        self._patience.calls += 1
        state = self._state
        if state is not None and not state.is_current():
            with self._lock:
                if self._state is state:
                    self._programs.clear()
                    self._refused.clear()
                    self._seen.clear()  # what changes at every call is not captured at every call
                    self._misses.clear()
                    self._before.clear()
                    self._patience.begin_again()
                    self._state, self._codes, self._builder = None, Codes(), self._new_builder()
        elif state is not None and state.holds_any(tensors):
            self.latest = KNOWN_ARGUMENTS
            return self.forward(*args, **kwargs)
        programs = self._programs.get(form) or self._proven(form, tensors)
        for position, (program, output) in enumerate(programs):
            try:
                results = program(tensors)
            except UnsettledError:
                return self.forward(*args, **kwargs)
            except RuntimeError as error:
                pass_on_interruption(error)
                return self._run_own(ModuleCall(args, kwargs, form, tensors), program, error)
            if results is not None:
                self._patience.served += 1
                self._patience.seconds += time.perf_counter() - began
                self._misses.pop(form, None)
                if position:
                    with self._lock:
                        self._programs[form] = _moved_to_front(programs, position)
                return output.rebuilt(results)
        if self._joined_by_proven(form, tensors):
            return self(*args, **kwargs)
        return self._run_new(ModuleCall(args, kwargs, form, tensors))

    def _run_stock(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call that is no plain inference."""
        if is_traced_by_proxies() and self.watch:
            with self._lock:  # programs are made anew, with parameters that are watched again
                self.watch.end()
                self._programs.clear()
                self._before.clear()
                self._state = None
        return self.forward(*args, **kwargs)

    def _joined_by_proven(self, form: Hashable, tensors: list[Tensor]) -> bool:
        """Whether programs serve a form from now on that were proven later than its own were made:
        for other values that the code reads."""
        own = self._programs.get(form)
        if not own or len(own) >= MOST_PROGRAMS or form in self._refused:
            return False
        more = [
            p for p in self._builder.proven(form, tensors) if not any(p[0].is_of(o) for o, _ in own)
        ]
        if not more or not self._lock.acquire(blocking=False):
            return False
        try:
            is_current = self._programs.get(form) is own
            if is_current:
                self._programs[form] = [*more, *own]
            return is_current
        finally:
            self._lock.release()

    def _proven(
        self, form: Hashable, tensors: list[Tensor]
    ) -> Sequence[tuple[RecordedProgram, OutputStructure]]:
        """Programs of other sizes that are proven to be right for such calls."""
        found = [] if form in self._refused else self._builder.proven(form, tensors)
        if found and len(self._programs) < MOST_FORMS and self._lock.acquire(blocking=False):
            try:
                self._programs.setdefault(form, found)
            finally:
                self._lock.release()
        return found

    def _run_own(self, call: ModuleCall, failed: RecordedProgram, error: RuntimeError) -> Any:
        """Run the module's own code in place of a program that raised an error.

        It says itself what is wrong with the input; where nothing is, the program goes.
        """
        value = self.forward(*call.args, **call.kwargs)
        with self._lock:
            rest = [own for own in self._programs.get(call.form, ()) if own[0] is not failed]
            self._programs[call.form] = rest
            self._refused[call.form] = f"its program fails: {error}"
        return value

    def _run_new(self, call: ModuleCall) -> Any:
        form = call.form
        known = len(self._programs.get(form, ()))
        if known:
            self._note_miss(form, known)
        seen = self._seen.get(form, 0) + 1
        if form in self._seen or len(self._seen) < MOST_SEEN:
            self._seen[form] = seen
        is_full = len(self._programs) >= MOST_FORMS if known == 0 else known >= MOST_PROGRAMS
        is_due = known > 0 or seen >= self._patience.waits
        is_wanted = form not in self._refused and not is_full and (is_due or seen == 1)
        began = time.perf_counter()
        if not is_wanted or not self._may_try() or self._lock.locked():
            value = self.forward(*call.args, **call.kwargs)
            self._patience.seconds += time.perf_counter() - began
            return value
        try:
            if is_due and form in self._before:
                return self._capture(call)[0]
            found = self._shared(call)
            return self._look(call) if found is None else found[0]
        finally:
            self._patience.spent += time.perf_counter() - began

    def _may_try(self) -> bool:
        """Whether a call may take longer, so that later ones are served by a program."""
        has_tries = self._patience.has_tries(are_asked_for=not self.must_gain)
        return has_tries and can_watch() and not self.why_not_now()

    def _look(self, call: ModuleCall) -> Any:
        """Run the module's own code, and note what it can have read, as it is behind the run.

        If a further call leaves that as it is, the code keeps no state, and can be run more often
        than it was asked for.
        """
        self._patience.tries += 1
        self.watch.begin()
        codes = Codes()
        with codes.watching():
            value = self.forward(*call.args, **call.kwargs)
        self._keep_look(call.form, codes, None if self._stands_in() else value)
        return value

    def _keep_look(self, form: Hashable, codes: Codes, value: Any) -> None:
        """value: that of the module's own code, which nothing but the look went with; or None."""
        try:
            if codes.refusal is not None:
                raise CaptureError(codes.refusal)
            if len(self._before) >= MOST_LOOKS:
                self._before.pop(next(iter(self._before)), None)
            state = Reachable(self.module, codes)
            forms = None if value is None else forms_of_output(value)
            self._before[form] = Look(state, codes, forms)
        except Exception as error:  # the model's code has run: its output is the answer
            pass_on_interruption(error)
            if self._seen.get(form, 0) > 1:  # what code does at its first call alone is no reason
                self._refused[form] = in_words(error)

    def _shared(self, call: ModuleCall) -> tuple[Any] | None:
        """Run the own code once, and look whether a program of other forms serves this one.

        Returns its output in a tuple; None, with nothing run, where there is no such program.
        """
        given, is_known = self._state, False
        if given is None or not self._lock.acquire(blocking=False):
            return None
        state = given

        def is_unchanged() -> bool:
            nonlocal is_known
            is_known = given.is_current() and given.covers(codes)
            return is_known

        try:
            before, codes = self._state_before(call), Codes()
            if before is None:
                return (self.forward(*call.args, **call.kwargs),)
            with own_code():
                # Further sizes show that more will come: the first one might have been a rest.
                joins = is_unchanged if len(self._seen) > 1 else None
                found = self._builder.served(self._seen_by(codes), call, joins)
            if found is None:
                return None
            self._patience.tries += 1
            value, program = found.output, found.program
            if program is None or not state.covers(codes) or not before.holds():
                self._keep_look(call.form, codes, None)
                return (value,)
            try:
                if is_known and not state.is_current():  # a first program imports parts of torch
                    state = Reachable(self.module, self._codes)
                    self._state = state.without_values()
                output = self._output(value, state, call)
                if call.has_kept_its_form():
                    self._append(call.form, program, output)
                    if state.is_current():
                        self._leave(self._builder.prove(found, self.forward, call, output))
            except (CaptureError, ForeignError):
                pass  # the next call of this form says why, if it comes to that
            return (value,)
        finally:
            self._lock.release()

    def _leave(self, former: Sequence[Placed]) -> None:
        """Have calls take programs that were proven in place of former ones."""
        for form, own in [*self._programs.items()]:
            if any(program.runs(each) for program, _ in own for each in former):
                self._programs.pop(form, None)

    def _append(self, form: Hashable, program: RecordedProgram, output: OutputStructure) -> None:
        self._programs[form] = [(program, output), *self._programs.get(form, ())]

    def _output(self, value: Any, state: Reachable, call: ModuleCall) -> OutputStructure:
        """What a call returned, to be rebuilt. Raises CaptureError where it is others' too."""
        output = OutputStructure(value)
        known = {id(own) for own in containers((call.args, call.kwargs))}
        if any(id(own) in known or state.holds(own) for own in containers(value)):
            raise CaptureError("it returns a list, dictionary or object of others")
        return output

    def _note_miss(self, form: Hashable, known: int) -> None:
        """Give a form up whose programs never hold: values that are read differ at each call."""
        self._misses[form] = self._misses.get(form, 0) + 1
        if known == MOST_PROGRAMS and self._misses[form] > MOST_MISSES:
            with self._lock:
                self._programs[form] = []
                self._refused[form] = "the values that its code reads differ from call to call"

    def _capture(self, call: ModuleCall) -> tuple[Any]:
        """Run the module's own code, and add a program for such calls; its output in a tuple.

        Where there can be no program the reason is noted. Raises what the module's code raises.
        """
        with self._lock:
            look = self._before.pop(call.form, None)
            if look is None or not look.state.is_current():
                if look is not None:
                    self.latest = CHANGES
                return (self._look(call),)
            if look.state.holds_arguments(call):
                self.latest = KNOWN_ARGUMENTS
                return (self.forward(*call.args, **call.kwargs),)
            self._patience.tries += 1
            before = self._state_before(call)
            if before is None:
                return (self.forward(*call.args, **call.kwargs),)
            value, recording, codes = self._run_once(call)
            try:
                if isinstance(recording, CaptureError):
                    raise recording
                is_unchanged = look.state.is_current() and before.holds()
                if not is_unchanged or not call.has_kept_its_form():
                    # Else the runs below would do again what was asked for once.
                    raise CaptureError("its code writes to its input or keeps a state")
                codes.add(look.codes)
                forms = look.forms or self._watched(codes, call)
                self._add(call, Seen(recording, value, forms), codes)
                if self.must_gain:
                    self._refuse_loss(call)
            except Exception as error:
                pass_on_interruption(error)
                self._refused[call.form] = in_words(error)
            return (value,)

    def _state_before(self, call: ModuleCall) -> Before | None:
        """What a run of the module can write to; None where it cannot be looked at, and such calls
        have no program."""
        try:
            return Before(self.module, call)
        except Exception as error:  # of the user's objects, whose call it must not fail
            pass_on_interruption(error)
            self._refused[call.form] = in_words(error)
            return None

    def _refuse_loss(self, call: ModuleCall) -> None:
        """Time a program that was just made beside the module's own code. Where that takes no
        longer, the program goes, and CaptureError is raised."""
        if not measure.TIMED:
            return
        (program, output), *others = self._programs[call.form]
        state = self._state
        assert state is not None

        def own() -> Any:
            return self.forward(*call.args, **call.kwargs)

        def ours() -> Any:
            _, tensors = form_of_call(call.args, call.kwargs)
            results = program(tensors) if state.is_current() else None
            if results is None:
                raise CaptureError("a further run of its operators gives other values")
            return output.rebuilt(results)

        try:
            if times := turns.why_not_faster(own, ours):
                raise CaptureError(f"its program is not faster: {times}")
        except BaseException:
            self._programs[call.form] = others
            if not self.programs():  # with what it has packed
                self._programs.clear()
                self._builder = self._new_builder()
            raise

    def _run_once(
        self, call: ModuleCall, looks_on: bool = True
    ) -> tuple[Any, Recording | CaptureError, Codes]:
        """The output of the module's own code, a recording of the run, or why there is none, and
        the code that ran. looks_on: see `recorded_once`."""
        codes = Codes()
        run = partial(self._seen_by(codes), *call.args, **call.kwargs)
        with own_code():  # a value that is the caller's may not take a way for recordings
            value, found = recorded_once(
                run, output_tensors, call.tensors, looks_on=looks_on, keeps=True
            )
        if codes.refusal is not None:
            found = CaptureError(codes.refusal)
        return value, found, codes

    def _add(
        self, call: ModuleCall, seen: Seen, codes: Codes, known: Reachable | None = None
    ) -> None:
        """Add a program for such calls.

        seen, codes: of runs of the module's own code.
        known: what it can read, as it was and is still.

        Raises CaptureError.
        """
        self._codes.add(codes)  # of all programs, which one look serves
        for _ in range(2):  # building imports parts of torch at its first time
            is_known = known is not None and known.covers(self._codes)
            state = known if known and is_known else Reachable(self.module, self._codes)
            known, ran = None, Codes()
            run = self._seen_by(ran) if seen.was_watched else self.forward
            program, value = self._builder.build(run, call, seen)
            if state.is_current() and state.covers(ran):
                break
            self._codes.add(ran)
        else:
            raise CaptureError(self._codes.refusal or "its code keeps a state")
        if state.holds_arguments(call):
            raise CaptureError(KNOWN_ARGUMENTS)
        output = self._output(value, state, call)
        if self._state is None or not self._state.is_current():
            self._programs.clear()
        self._state = state.without_values()  # programs follow writes to tensors
        self._append(call.form, program, output)

    def _seen_by(self, codes: Codes) -> Callable[..., Any]:
        """The module's forward, whose code `codes` watches."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            with codes.watching():
                return self.forward(*args, **kwargs)

        return forward

    def _watched(self, codes: Codes, call: ModuleCall) -> list[Form]:
        """Look at a run of the module's own code, and at one of what stands in for parts; the forms
        of the tensors that the first one gives."""
        with codes.watching():
            with own_code():
                value = self.forward(*call.args, **call.kwargs)
            self.forward(*call.args, **call.kwargs)
        if codes.refusal is not None:
            raise CaptureError(codes.refusal)
        return forms_of_output(value)

    def _stands_in(self) -> bool:
        """Whether something else runs in place of the own code of parts."""
        own = (m.__dict__.get("forward") for m in self.module.modules() if m is not self.module)
        return any(getattr(forward, "stands_in", False) for forward in (self.inner, *own))

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        """While it stands where it will: the attributes of the module are counted."""
        places = self.module.__dict__
        before = places.get("forward", MISSING)
        places["forward"] = self
        try:
            yield
        finally:
            if before is MISSING:
                del places["forward"]
            else:
                places["forward"] = before

    def check_plain(self) -> None:
        """Raises CaptureError where no call is captured for now."""
        if is_special(self.module):
            raise CaptureError(SPECIAL)

    def why_not_now(self) -> str:
        """Why no call becomes a program for now; empty where one may."""
        if is_special(self.module):
            return SPECIAL
        # Where programs are asked for, what others write to memory that they hold is their risk.
        return HELD if self.must_gain and self.watch.are_held() else ""

    def __getstate__(self) -> dict[str, Any]:
        kept = ("module", "inner", "must_gain")
        return {name: self.__dict__[name] for name in kept if name in self.__dict__}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()


def _moved_to_front(items: Any, position: int) -> list[Any]:
    return [items[position], *items[:position], *items[position + 1 :]]
