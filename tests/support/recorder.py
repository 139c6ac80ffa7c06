"""Writes down what a training program asks of its backend and of its device's streams, in order and with sizes.

A `Recorder` is told of each call (by record_calls.py and stand_in_streams.py) and makes a `Recording` of them. That has
two sections. Data is what the parameters' own backend carries, with everything about streams. Control is what hosts say
to each other by connections of their own. What all ranks must issue in the same order is listed once more, for a check.

A line of a recording is one call. `stream 1 behind default: X; Y` is several: stream 1 waits for the default stream,
becomes the current one for X and Y, and the default stream is the current one again. An event is named by the call of
the program in which it was recorded, and by its number there. Waits in a row share a line.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from stand_in_streams import StreamModule

LONGEST = 116  # characters of a line in a recording


@dataclass
class Phase:
    """One call of the program: what it led to, line by line."""

    name: str
    data: list[str] = field(default_factory=list)
    control: list[str] = field(default_factory=list)
    events: int = 0


@dataclass
class Iteration:
    name: str
    phases: list[Phase] = field(default_factory=list)


EventName = tuple[int, str, int]  # the number of the iteration, the phase, and the event's number there


@dataclass(frozen=True)
class Recording:
    """What one rank has recorded: the two sections as text, and what must fit to the other ranks' recordings."""

    data: str
    control: str
    collectives: list[str]  # the same on every rank
    sent: list[tuple[int, int]]  # messages: to which rank, and how many bytes
    received: list[tuple[int, int]]
    problems: list[str]


class Recorder:
    """Collects the lines of one rank's recording, by iterations and by the program's calls in each of them."""

    streams: StreamModule  # the stand-in's, set by record_calls.py

    def __init__(self, group: Any) -> None:
        self.group = group
        self.indent = 0
        self.names: dict[str, nn.Module] = {}  # models whose parameters are named, by what stands before their names
        self._groups = [group]
        self._iterations: list[Iteration] = []
        self._collectives: list[str] = []
        self._sent: list[tuple[int, int]] = []
        self._received: list[tuple[int, int]] = []
        self._problems: list[str] = []
        self._thread = threading.get_ident()
        self.iteration("before training")
        self.phase("build")

    # -- what programs call -------------------------------------------------------------------------------------------

    def iteration(self, name: str = "") -> None:
        """Begin an iteration; those without a name are numbered."""
        number = sum(iteration.name.startswith("iteration ") for iteration in self._iterations) + 1
        self._iterations.append(Iteration(name or f"iteration {number}"))

    def phase(self, name: str) -> None:
        """Begin a call of the program. Calls of one name in one iteration are numbered."""
        phases = self._iterations[-1].phases
        earlier = sum(phase.name.split(" #")[0] == name for phase in phases)
        phases.append(Phase(f"{name} #{earlier + 1}" if earlier else name))

    def mark(self, text: str, number: int | None = None) -> None:
        """Write a line about the program itself. Marks with the same text, one after the other, share a line."""
        lines, pad = self._phase.data, "  " * self.indent
        if lines and re.fullmatch(rf"{re.escape(pad + text)}( [\d ]+)?", lines[-1]):
            lines[-1] += "" if number is None else f" {number}"
        else:
            self.note(text if number is None else f"{text} {number}")

    # -- what stand-ins call ------------------------------------------------------------------------------------------

    def note(self, text: str) -> None:
        """Write a line of the data section."""
        self._check_thread(text)
        self._phase.data.append("  " * self.indent + text)

    def name_event(self) -> EventName:
        """Return a new name for an event that is recorded now."""
        phase = self._phase
        phase.events += 1
        return len(self._iterations), phase.name, phase.events

    def show_event(self, name: EventName | None) -> str:
        """Return the name of an event as text, relative to this iteration: one iteration reads like the next."""
        if name is None:
            return "that was never recorded"
        iteration, phase, number = name
        ago = len(self._iterations) - iteration
        return f"{phase}.{number}" + (f" of {ago} iterations before" if ago > 1 else " of the iteration before" * ago)

    @property
    def is_building(self) -> bool:
        """Whether the program builds something now, for which the package may step optimizers on trial."""
        return self._phase.name.split()[0] in ("build", "add_param_group")

    @property
    def _phase(self) -> Phase:
        return self._iterations[-1].phases[-1]

    def _check_thread(self, text: str) -> None:
        if threading.get_ident() != self._thread:
            self._problems.append(f"on another thread, so in no certain order: {text}")

    # -- collectives and messages -------------------------------------------------------------------------------------

    def collective(self, name: str, group: Any, args: Sequence[Any]) -> str:
        """Write the line of a collective, and return it."""
        options = next((one for one in args if hasattr(one, "asyncOp") or hasattr(one, "reduceOp")), None)
        where = self._where(group)
        tensors = [flat for flat in map(flat_tensors, args) if flat]
        if name == "all_to_all":
            text = _all_to_all(tensors, args)
            self._collectives.append(name + where)  # every rank sends something else
        else:
            words = [name, *_operation(name, options, tensors), _sizes(tensors), *_root(name, options)]
            text = " ".join(word for word in words if word)
            self._collectives.append(text + where)
        if name.startswith("all_gather") and _are_in_place(*tensors):
            text += " in place"
        line = text + self._parameters(tensors) + where + (" async" if getattr(options, "asyncOp", False) else "")
        self.note(line)
        return line

    def message(self, name: str, group: Any, tensors: Sequence[torch.Tensor], peer: int) -> str:
        """Write the line of a message from rank to rank, and return it."""
        nbytes = sum(tensor.nbytes for tensor in tensors)
        (self._sent if name == "send" else self._received).append((peer, nbytes))
        line = f"{name} {nbytes} bytes, peer {peer}{self._where(group)}"
        self.note(line)
        return line

    def control(self, text: str) -> None:
        """Write a line of the control section."""
        self._check_thread(text)
        self._phase.control.append(text)

    def _where(self, group: Any) -> str:
        """Return which group a call uses, numbered by first use; nothing for the program's own group."""
        known = [number for number, other in enumerate(self._groups) if other is group]
        if not known:
            self._groups.append(group)
            known = [len(self._groups) - 1]
        return f" on group {known[0] + 1}" if known[0] else ""

    def _parameters(self, tensors: Sequence[Sequence[torch.Tensor]]) -> str:
        """Return at which parameters the memory of a call begins, as far as it is the memory of parameters."""
        places = [place for tensor in (tensors[0] if tensors else ()) if (place := self._place_of(tensor))]
        return f" at {', '.join(places)}" if places else ""

    def _place_of(self, tensor: torch.Tensor) -> str:
        with torch._C.DisableTorchFunctionSubclass():  # weights that are in flight must not be waited for here
            for prefix, model in self.names.items():
                for name, param in model.named_parameters():
                    start = torch.Tensor.data_ptr(param)
                    offset, rest = divmod(tensor.data_ptr() - start, param.element_size())
                    if 0 <= offset < param.numel() and not rest:
                        return f"{prefix}{name}" + (f"+{offset}" if offset else "")
        return ""

    # -- at the end ---------------------------------------------------------------------------------------------------

    def finish(self) -> Recording:
        """Return the recording."""
        problems = list(dict.fromkeys(self._problems))
        data, control = self._text(lambda phase: folded(phase.data)), self._text(_grouped_control)
        return Recording(data, control, self._collectives, self._sent, self._received, problems)

    def _text(self, lines_of: Callable[[Phase], Sequence[str]]) -> str:
        """Return a section. A call that repeats what it did in an earlier iteration is one line; so is an iteration."""
        lines: list[str] = []
        shown: dict[str, tuple[str, Sequence[str]]] = {}  # by phase: in which iteration it was written out, and what
        before: list[str] = []
        for iteration in self._iterations:
            found = [(phase.name, inner) for phase in iteration.phases if (inner := lines_of(phase))]
            names = [name for name, _ in found]
            if names and names == before and all(shown[name][1] == inner for name, inner in found):
                lines.append(f"{iteration.name}: as before")
                continue
            lines.append(iteration.name if names else f"{iteration.name}: nothing")
            for name, inner in found:
                place, earlier = shown.get(name, ("", ()))
                if earlier == inner and len(inner) > 1:
                    lines.append(f"  {name}: as in {place}")
                else:
                    lines += [f"  {name}", *(f"    {one}" for one in inner)]
                    shown[name] = iteration.name, inner
            before = names or before
        return "\n".join(lines) + "\n"


def folded(lines: Sequence[str]) -> list[str]:
    """Return the same in fewer lines: one for what runs on another stream, if it fits, and one for waits in a row."""
    found: list[str] = []
    rest = list(lines)
    while rest:
        line = rest.pop(0)
        stream = line.removesuffix(":")
        if line == stream or line.startswith(" "):
            words = re.fullmatch(r"(\S.* waits for event) (.*)", line)
            if words and found and found[-1].startswith(f"{words[1]} "):
                found[-1] += f", {words[2]}"
            else:
                found.append(line)
            continue
        inner = []
        while rest and rest[0].startswith("  "):
            inner.append(rest.pop(0)[2:].removeprefix(f"{stream} "))
        if found and found[-1].startswith(f"{stream} waits for ") and " event " not in found[-1]:
            stream += " behind" + found.pop().removeprefix(f"{stream} waits for")
        together = f"{stream}: {'; '.join(inner) or 'nothing'}"
        is_short = len(together) <= LONGEST and not any(one.startswith(" ") for one in inner)
        found += [together] if is_short else [f"{stream}:", *(f"  {one}" for one in inner)]
    return found


def _grouped_control(phase: Phase) -> list[str]:
    runs = [(text, len(list(run))) for text, run in groupby(phase.control)]
    return [text if count == 1 else f"{count} x {text}" for text, count in runs]


def flat_tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors in a tensor, or in nested lists; none for anything else."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for one in value for tensor in flat_tensors(one)] if isinstance(value, list | tuple) else []


def _operation(name: str, options: Any, tensors: Sequence[Sequence[torch.Tensor]]) -> list[str]:
    """Return how a reduction combines values, and in which dtypes."""
    if "reduce" not in name:
        return []
    operation = str(options.reduceOp.op).rpartition(".")[-1].lower()
    return [operation, *dict.fromkeys(str(tensor.dtype).removeprefix("torch.") for flat in tensors for tensor in flat)]


def _root(name: str, options: Any) -> list[str]:
    if name not in ("broadcast", "reduce", "gather", "scatter"):
        return []
    return [f"{'from' if name in ('broadcast', 'scatter') else 'to'} rank {options.rootRank}"]


def _sizes(tensors: Sequence[Sequence[torch.Tensor]]) -> str:
    """Return the bytes of inputs and outputs. Outputs come first in torch's calls, and read better behind."""
    shown = [", ".join(str(tensor.nbytes) for tensor in flat) for flat in reversed(tensors)]
    return f"{' -> '.join(shown)} bytes" if shown else ""


def _all_to_all(tensors: Sequence[Sequence[torch.Tensor]], args: Sequence[Any]) -> str:
    (output,), (own,) = tensors
    splits = [one for one in args if isinstance(one, list) and all(isinstance(size, int) for size in one)]
    received, sent = ([size * own.element_size() for size in one] for one in splits)
    assert (sum(received) or output.nbytes, sum(sent) or own.nbytes) == (output.nbytes, own.nbytes), "flat tensors"
    return f"all_to_all sends {sent} receives {received} bytes"


def _are_in_place(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> bool:
    """Return whether every input lies in its output, so that the backend copies nothing."""
    pairs = list(zip(outputs, inputs, strict=False))
    return len(outputs) == len(inputs) and all(
        0 <= own.data_ptr() - whole.data_ptr() <= whole.nbytes - own.nbytes for whole, own in pairs
    )
