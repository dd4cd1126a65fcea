"""A program in place of what the passes made of a model, once its calls show that it pays.

Without a sample input nobody knows what a model is called with. So its layers are packed first.
When calls of one form come again, what the passes did is taken back, and a program is made of such
a call. It stays if it is faster than what the passes made; else they run again, for good.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.compiler import is_compiling

from .. import _garbage
from ..core.interruption import pass_on_interruption
from ..core.modes import is_plain_inference, with_normal_tensors
from ..core.packed import PackedTensor
from ..graph.code import can_watch
from ..graph.errors import CaptureError
from ..graph.forward import AroundForward
from ..graph.state import has_drawn, random_states, random_unmoved
from ..program.before import Before
from ..program.call_report import replays_of
from ..program.codes import Codes
from ..program.eligible import ParameterWatch, is_special
from ..program.inputs import ForeignError, ModuleCall, form_of_call
from ..program.looks import CHANGES, KNOWN_ARGUMENTS, in_words
from ..program.reachable import Reachable
from ..program.replay import Replay
from ..rewriting import measure, turns
from ..rewriting.changes import ATTRIBUTE, AttributeSet, ChangeLog, log_of
from ..rewriting.copies import InPlace
from .context import OptimizeContext
from .text_models import core_of

MOST_FORMS = 256
"""Input signatures that are counted."""
CALLS = 3
"""Calls of one input signature, of which the last is looked at: the first makes what code makes
once, the second is looked on."""
GAIN = 0.95
"""A program has two copies of the weights. It takes at most this part of the time of what the
passes made, which has one."""
MOST_DELAYS = 3
"""Calls of which no program can be made for the same reason, which another call might not have."""
ROUNDS = 5
"""Calls of each that are timed."""
LONGEST_WAIT = 0.5
"""Seconds that a call waits for those of other threads, to change the model while none runs."""


@dataclass(frozen=True)
class Plan:
    """How a model is optimized: by the passes `names`, in `dtype`.

    dtypes: of its tensors, once the passes have run.
    """

    model: nn.Module
    dtype: Any
    names: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...] = ()

    @property
    def module(self) -> nn.Module:
        """The module whose calls may become programs."""
        return core_of(self.model) or self.model

    def holds(self) -> bool:
        """Whether nobody has given the model tensors of other dtypes since."""
        return self.dtypes == dtypes_of(self.model)

    @with_normal_tensors
    def run(self, waiting: WaitingForward, as_program: bool) -> OptimizeContext:
        """Take back what was done to the model, and run the passes, or make calls programs.

        waiting: is the module's forward meanwhile, so that calls that others begin wait.
        """
        from . import optimize_in_place

        end_watches(self.model)
        waiting.module.__dict__["forward"] = waiting
        log = log_of(self.model)
        if log is not None:
            log.changes = [c for c in log.changes if getattr(c, "value", None) is not waiting]
            log.undo()
            delattr(self.model, ATTRIBUTE)
        names = ("program", *self.names) if as_program else self.names
        given = self.model, self.dtype, None, names, InPlace(self.model)
        with random_unmoved(), measure.steady_heap():
            context = optimize_in_place(*given, must_gain=as_program)
        waiting.leave(context.log)
        return context


class Gate:
    """Counts the calls that are under way, so that one can change what the others use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside: dict[object, int] = {}  # adding and removing an entry takes no lock

    @contextmanager
    def entered(self) -> Iterator[None]:
        token, own = object(), threading.get_ident()
        self._inside[token] = own
        while self._lock.locked() and [*self._inside.values()].count(own) == 1:
            del self._inside[token]
            with self._lock:
                pass
            self._inside[token] = own
        try:
            yield
        finally:
            self._inside.pop(token, None)

    @contextmanager
    def alone(self) -> Iterator[bool]:
        """Within, no other call is under way, if True; others that come wait."""
        if not self._lock.acquire(blocking=False):
            yield False
            return
        try:
            ends = time.perf_counter() + LONGEST_WAIT
            own = threading.get_ident()
            while (inside := [*self._inside.values()]) and own not in inside:
                if time.perf_counter() > ends:
                    break
                time.sleep(1e-4)
            yield not inside
        finally:
            self._lock.release()


class WaitingForward(AroundForward):
    """Runs what the passes made of a module, until calls of one form have come a few times.

    Then their program takes its place, if it is faster.
    """

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan.module)
        self.plan = plan
        self._start()

    def _start(self) -> None:
        self._gate = Gate()
        self.watch = ParameterWatch(self.module)
        self._counts: dict[Hashable, int] = {}
        self._looks: dict[Hashable, Reachable] = {}
        self._has_moved = False
        self._delays: dict[str, int] = {}
        self.latest = ""  # there was none by the latest try
        self.why = ""  # there will be no program

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not is_plain_inference() or self.module.training:
            if is_compiling():
                return self.forward(*args, **kwargs)
            return self._run(args, kwargs)
        call = None if self.why or self._has_moved else self._counted(args, kwargs)
        count = 0 if call is None else self._counts[call.form]
        if call is None or count < CALLS - 1 or not self._may_change():
            return self._run(args, kwargs)
        if count < CALLS or call.form not in self._looks:
            return self._look(call)
        return self._change(call)

    def in_words(self) -> list[str]:
        """What becomes of the calls."""
        if self.why:
            return [f"no program is made: {self.why}"]
        if self.latest:
            return [f"no program is made for now: {self.latest}"]
        return [f"a program is tried at call {CALLS} of an input signature"]

    def leave(self, log: ChangeLog) -> None:
        """Be no part of the module's forward any more, in place of which others were set."""
        for change in log.changes:
            if isinstance(change, AttributeSet) and change.before is self:
                change.before = None
                if getattr(change.value, "inner", None) is self:
                    change.value.inner = getattr(change.value, "own", None)
        places = self.module.__dict__
        if places.get("forward") is self:
            del places["forward"]

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self._gate.entered():
            if not self._has_moved:
                return self.forward(*args, **kwargs)
        return self._successor()(*args, **kwargs)

    def _successor(self) -> Callable[..., Any]:
        """The forward that the module has now."""
        found = self.module.__dict__.get("forward")
        if found is None or found is self:
            return partial(type(self.module).forward, self.module)
        return found  # type: ignore[no-any-return]

    def _counted(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ModuleCall | None:
        try:
            call = ModuleCall(args, kwargs, *form_of_call(args, kwargs))
        except ForeignError as error:  # such calls would run plain code beside a program
            self.why = str(error)
            return None
        if call.form not in self._counts and len(self._counts) >= MOST_FORMS:
            return None
        self._counts[call.form] = self._counts.get(call.form, 0) + 1
        return call

    def _may_change(self) -> bool:
        """Whether a model that is as it was left can be changed, for now."""
        stands = self.module.__dict__.get("forward") is self
        if not stands or not self.plan.holds():
            self.why = "the model was changed after it was optimized"
            return False
        return can_watch() and not is_special(self.module)

    def _look(self, call: ModuleCall) -> Any:
        """Run the passes' work, and note what the code can have read, as it is behind the run."""
        codes = Codes()
        with self._gate.entered():
            if self._has_moved:
                return self._successor()(*call.args, **call.kwargs)
            self.watch.begin()
            with codes.watching():
                value = self.forward(*call.args, **call.kwargs)
        try:
            if codes.refusal is not None:
                raise CaptureError(codes.refusal)
            self._looks[call.form] = Reachable(self.module, codes, may_unpack=True)
        except Exception as error:  # the model's code has run: its output is the answer
            pass_on_interruption(error)
            self.why = in_words(error)
        return value

    def _change(self, call: ModuleCall) -> Any:
        """Run the passes' work once more, and then try a program in its place."""
        if any(
            isinstance(p, PackedTensor) and p.is_held_by_others()
            for p in self.plan.model.parameters()
        ):
            self._put_off("others hold tensors that share the memory of its packed weights")
            return self._run(call.args, call.kwargs)
        value, is_pure = self._run_looking(call)
        self._looks.clear()  # they hold the memory of weights
        if is_pure:
            self._try(call)
        elif self.why:
            self.watch.end()
        return value

    def _run_looking(self, call: ModuleCall) -> tuple[Any, bool]:
        """What a call gives, and whether it leaves all as it was that code can read."""
        look, before, numbers = self._looks.get(call.form), None, random_states()
        try:
            if look is not None and look.is_current():
                before = Before(self.module, call)
        except Exception as error:  # of the user's objects, whose call it must not fail
            pass_on_interruption(error)
            self.why = in_words(error)
        value = self._run(call.args, call.kwargs)
        if look is None or before is None or self._has_moved:
            self.latest = CHANGES
            return value, False
        if not (look.is_current() and before.holds() and call.has_kept_its_form()):
            self.why = "its code writes to its input or keeps a state"
            return value, False
        if look.holds_arguments(call):
            self._put_off(KNOWN_ARGUMENTS)
            return value, False
        if has_drawn(numbers):  # the code has, or another thread
            self._put_off("its code draws random numbers")
            return value, False
        return value, True

    def _put_off(self, why: str) -> None:
        """Try a later call, unless this is the reason again and again."""
        self.latest = why
        self._delays[why] = self._delays.get(why, 0) + 1
        if self._delays[why] == MOST_DELAYS:
            self.why = why

    def _try(self, call: ModuleCall) -> None:
        """Have a program take the place of what the passes made, or say why not."""

        seconds = _least(lambda: self._run(call.args, call.kwargs))
        try:
            with self._gate.alone() as is_alone:
                if not is_alone or self._has_moved:
                    return
                self._has_moved = True  # calls that wait take what is there then
                self.plan.run(self, as_program=True)
            replay = self.module.__dict__.get("forward")
            if isinstance(replay, Replay):  # else the other passes have run
                replay.prepare(call.args, call.kwargs)
                _refuse_loss(replay, call, seconds)
        except BaseException as error:
            with self._gate.alone():
                context = self.plan.run(self, as_program=False)
            if not isinstance(error, Exception):
                raise
            context.skipped("program", self.module, in_words(error))

    def __getstate__(self) -> dict[str, Any]:
        kept = ("module", "inner", "plan")
        return {name: self.__dict__[name] for name in kept if name in self.__dict__}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()


def _least(run: Callable[[], Any]) -> float:
    """The least time of a call, which other loads of the machine make longer."""
    found = []
    measure.hold_heap()
    with torch.no_grad(), _garbage.paused():
        for _ in range(ROUNDS):
            began = time.perf_counter()
            run()
            found.append(time.perf_counter() - began)
    return min(found)


def _refuse_loss(replay: Replay, call: ModuleCall, seconds: float) -> None:
    """Raises CaptureError where a program takes longer than it may beside the passes' work."""
    if not measure.TIMED:
        return
    least = _least(lambda: replay(*call.args, **call.kwargs))
    if least > GAIN * seconds:
        times = turns.in_words(least / seconds, seconds, least)
        raise CaptureError(f"its program is not faster than what the other passes made: {times}")


def dtypes_of(model: nn.Module) -> tuple[torch.dtype, ...]:
    """The dtypes of a model's tensors."""
    return tuple(tensor.dtype for tensor in chain(model.parameters(), model.buffers()))


def wait(context: OptimizeContext, dtype: Any) -> None:
    """Have a model that the passes have changed wait for calls of which to make a program."""
    model = context.model
    plan = Plan(model, dtype, context.passes, dtypes_of(model))
    context.log.set_forward(plan.module, WaitingForward(plan))


def waiting_in(model: nn.Module) -> WaitingForward | None:
    """What stands in a model's forward while it waits."""
    forward = (core_of(model) or model).__dict__.get("forward")
    return forward if isinstance(forward, WaitingForward) else None


def end_watches(model: nn.Module) -> None:
    """Leave the parameters that were watched for programs as they were found."""
    if (waiting := waiting_in(model)) is not None:
        waiting.watch.end()
    for replay in replays_of(model):
        replay.watch.end()


__all__ = ["WaitingForward", "end_watches", "wait", "waiting_in"]
