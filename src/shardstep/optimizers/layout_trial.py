"""Whether an optimizer's work can be divided among ranks, and how finely: found by trying it on tiny tensors.

[Note: what is tried] One instance over all parameters is the plain optimizer. In a first step alone, anything that it
tries to send is caught, because its messages would come in between our own. Then it is compared with

- itself under another seed: what differs is drawn at random, and every rank would draw other numbers;
- itself with other gradients: an option or an attribute of the instance that differs is computed from the gradients of
  all parameters, such as one step size for all;
- one instance per parameter: what differs depends on the other parameters;
- one instance per piece of a parameter: what differs depends on the rest of the parameter.

Weights, state and options are compared, because a step size that has only begun to grow moves no weight yet. Gradients
grow and shrink by powers of ten, so that a bound on their norm takes effect. A trial cannot see what begins later
still: layout_policy.py says for which classes its result is enough to cut parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch.optim import Optimizer

from shardstep.optimizers.trial import (
    CommunicatesError,
    NoCommunication,
    Outcome,
    Tensors,
    Trial,
    alike,
    exactly,
    first_difference,
    nearly,
    nearly_moved,
    no_trace,
)

_CUTS = (0, 5, 16, 24)
# An optimizer that wants matrices refuses vectors, and says so by raising.
_SHAPES = (((6, 4), (24,)), ((6, 4), (4, 6)))
_SIZES = (1.0, 10.0, 0.1, 100.0, 1.0, 0.01, 1000.0, 1.0)  # of the gradients, from step to step
_STEPS = 24  # beyond the usual first steps: a rectified variance (6), a warm-up of 10 or 20
_STEPS_OF_TORCH = 8  # torch's own classes have no warm-up
_CALM_STEPS = 3  # used where the longer trial ends in infinities


@dataclass(frozen=True, slots=True)
class Finding:
    """What a trial has found, as sentences; all empty for an optimizer that treats every element alone."""

    refusal: str = ""  # why its work cannot be divided at all
    whole: str = ""  # why a parameter cannot be cut
    untried: str = ""  # why it could not be tried

    @property
    def is_elementwise(self) -> bool:
        return not (self.refusal or self.whole or self.untried)


def probe(
    optimizer_class: Callable[..., Optimizer],
    defaults: Mapping[str, Any],
    option_sets: Sequence[Mapping[str, Any]],
    device: torch.device,
    *,
    of_torch: bool = False,
    closure: bool = False,
) -> Finding:
    """Try the class with the options of each param group. Nothing that a caller can see is changed.

    A class `of_torch` is known to treat parameters separately, so only cuts are tried. With `closure` an optimizer that
    cannot be stepped without one is tried with one.
    """
    finding = Finding()
    tried: list[dict[str, Any]] = []
    with no_trace(device), torch.enable_grad():
        for options in option_sets:
            # Groups that differ in their learning rate alone, such as one for each layer, are tried once.
            distinct = _without_rate(options)
            if any(_same_options(distinct, other) for other in tried):
                continue
            tried.append(distinct)
            found = _try(Trial(optimizer_class, defaults, options), device, of_torch=of_torch)
            if found.untried and closure:
                with_closure = _try(
                    Trial(optimizer_class, defaults, options, with_closure=True), device, of_torch=False
                )
                found = found if with_closure.untried else with_closure
            if found.refusal:
                return found
            finding = Finding("", finding.whole or found.whole, finding.untried or found.untried)
    return finding


def _without_rate(options: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in options.items() if k not in ("params", "param_names", "lr", "initial_lr")}


def _same_options(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether options are certainly the same: tensors are compared by identity."""
    return list(one) == list(other) and all(
        one[key] is other[key] or (isinstance(one[key], bool | int | float | str | tuple) and one[key] == other[key])
        for key in one
    )


def _try(trial: Trial, device: torch.device, *, of_torch: bool) -> Finding:
    name = getattr(trial.optimizer_class, "__name__", str(trial.optimizer_class))
    untried = ""
    for shapes in _SHAPES:
        try:
            if not of_torch:
                _check_sends_nothing(trial, shapes, device)
            values, gradients, whole = _run_plain(trial, shapes, _STEPS_OF_TORCH if of_torch else _STEPS, device)
            refusal = "" if of_torch else _why_not_shared(name, trial, values, gradients, whole)
        except CommunicatesError as error:
            return Finding(_sends_itself(name, error))
        except Exception as error:
            untried = f"{name} refuses tiny tensors of shapes {shapes}: {type(error).__name__}: {error}"
            continue
        return Finding(refusal) if refusal else Finding(whole=_why_not_cut(name, trial, values, gradients, whole))
    return Finding(untried=untried)


def _check_sends_nothing(trial: Trial, shapes: Sequence[tuple[int, ...]], device: torch.device) -> None:
    """Raise CommunicatesError if a step sends something."""
    values = _draw(shapes, torch.Generator().manual_seed(11), device)
    with NoCommunication():  # type: ignore[no-untyped-call]
        trial.run([values], _gradients(shapes, 1, 12, device))


def _sends_itself(name: str, error: CommunicatesError) -> str:
    return (
        f"{name} talks to other ranks itself ({error} in its step), while every rank steps other parameters, or none. "
        "Use it unsharded, or with an option under which it does not"
    )


def _run_plain(
    trial: Trial, shapes: Sequence[tuple[int, ...]], steps: int, device: torch.device
) -> tuple[Tensors, list[Tensors], Outcome]:
    """Return values, the gradients of every step, and the plain optimizer's outcome, finite if possible."""
    values = _draw(shapes, torch.Generator().manual_seed(11), device)
    gradients = _gradients(shapes, steps, 12, device)
    whole = trial.run([values], gradients)
    if whole.is_finite:
        return values, gradients, whole
    # Infinities are all equal, so nothing would differ. Take fewer steps, with gradients of one size.
    calm = [_draw(shapes, torch.Generator().manual_seed(20 + step), device) for step in range(_CALM_STEPS)]
    return values, calm, trial.run([values], calm)


# -- what differs ------------------------------------------------------------------------------------------------------


def _why_not_shared(name: str, trial: Trial, values: Tensors, gradients: Sequence[Tensors], whole: Outcome) -> str:
    others = [[gradient.flip(0) * 1.5 for gradient in row] for row in gradients]
    again = trial.run([values], gradients, seed=2)
    return (
        _why_random(name, whole, again)
        or _why_from_gradients(name, _without_noise(whole, again), trial.run([values], others))
        or _why_not_alone(name, _without_noise(whole, again), trial.run([[value] for value in values], gradients))
    )


def _without_noise(whole: Outcome, again: Outcome) -> Outcome:
    """Drop attributes of the instance that differ from run to run and move no weight, such as the time."""
    own = {key: value for key, value in whole.own[0].items() if key in again.own[0]}
    stable = {key: value for key, value in own.items() if alike(value, again.own[0][key], exactly)}
    return replace(whole, own=[stable])


def _why_random(name: str, whole: Outcome, reseeded: Outcome) -> str:
    what = next(_differences(whole, reseeded, exact=False), None)
    if what is None:
        return ""
    return (
        f"{name} draws random numbers: {what} differs under another seed. Every rank steps only a part of the "
        "parameters, and so draws other numbers for them than the plain optimizer. Use it unsharded, or switch its "
        "random part off, if it has an option for that"
    )


def _why_from_gradients(name: str, whole: Outcome, with_other_gradients: Outcome) -> str:
    option = first_difference(whole.options[0], with_other_gradients.options[0], exactly)
    if option is not None:
        return _refuse_together(name, f"the option {option!r} of the param group is computed from the gradients of all")
    kept = _own_difference(whole, with_other_gradients.own[0])
    if kept is not None:
        return _refuse_together(name, f"{kept!r}, which it keeps on itself, is computed from the gradients of all")
    return ""


def _why_not_alone(name: str, whole: Outcome, alone: Outcome) -> str:
    what = next(_differences(whole, alone, exact=True), None)
    return _refuse_together(name, f"{what} is another when a parameter is stepped alone") if what else ""


def _own_difference(whole: Outcome, own: Mapping[str, Any]) -> str | None:
    return first_difference(whole.own[0], {key: own[key] for key in whole.own[0] if key in own}, exactly)


def _refuse_together(name: str, because: str) -> str:
    return (
        f"{name} treats all parameters together ({because}), so that stepping them on several ranks would silently "
        "compute something else. Use it unsharded, or choose an optimizer that treats parameters separately"
    )


def _differences(whole: Outcome, other: Outcome, *, exact: bool) -> Iterator[str]:
    """Yield what differs, in words; the one instance of `whole` is compared with every instance of `other`.

    `exact` where both compute the same: decay by a mean over all parameters changes only the last bits of a weight. Not
    where the same program runs twice: on a GPU it may sum in another order.
    """
    close, close_moves = (exactly, exactly) if exact else (nearly, nearly_moved)
    for ours, theirs in zip(whole.moved, other.moved, strict=True):
        if not close_moves(ours, theirs):
            yield "the new weight"
    for state, other_state in zip(whole.states, other.states, strict=True):
        if (key := first_difference(state, other_state, close)) is not None:
            yield f"the state {key!r}"
    for options in other.options:
        if (key := first_difference(whole.options[0], options, close)) is not None:
            yield f"the option {key!r} of the param group"
    for own in other.own if exact else ():
        if (key := _own_difference(whole, own)) is not None:
            yield f"{key!r}, which it keeps on itself,"


def _why_not_cut(name: str, trial: Trial, values: Tensors, gradients: Sequence[Tensors], whole: Outcome) -> str:
    try:
        cut = trial.run(
            [[part] for value in values for part in _cut(value)],
            [[part for gradient in row for part in _cut(gradient)] for row in gradients],
        )
    except Exception as error:
        return f"{name} refuses flat pieces of a parameter: {error}"
    what = next(_differences_of_pieces(whole, cut), None)
    if what is None:
        return ""
    return f"{name} treats the elements of a parameter together: cut up, it gives other numbers ({what} differs)"


def _differences_of_pieces(whole: Outcome, cut: Outcome) -> Iterator[str]:
    pieces = len(_CUTS) - 1
    for place, (moved, state) in enumerate(zip(whole.moved, whole.states, strict=True)):
        for number, (start, stop) in enumerate(pairwise(_CUTS)):
            piece = place * pieces + number
            if not nearly_moved(moved.reshape(-1)[start:stop], cut.moved[piece]):
                yield "the new weight"
            expected = {key: _part(value, moved.numel(), start, stop) for key, value in state.items()}
            if (key := first_difference(expected, cut.states[piece], nearly)) is not None:
                yield f"the state {key!r}"


def _part(value: Any, numel: int, start: int, stop: int) -> Any:
    per_element = isinstance(value, torch.Tensor) and value.numel() == numel
    return value.reshape(-1)[start:stop] if per_element else value


# -- numbers -----------------------------------------------------------------------------------------------------------


def _gradients(shapes: Sequence[tuple[int, ...]], steps: int, seed: int, device: torch.device) -> list[Tensors]:
    generator = torch.Generator().manual_seed(seed)
    sizes = [_SIZES[step % len(_SIZES)] for step in range(steps)]
    return [[value * size for value in _draw(shapes, generator, device)] for size in sizes]


def _draw(shapes: Sequence[tuple[int, ...]], generator: torch.Generator, device: torch.device) -> Tensors:
    """Draw numbers whose scale grows along each parameter, so that the norm of a piece differs from that of all."""
    kind: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}  # whatever the program's defaults are
    scale = torch.logspace(-2, 1, 24, **kind)
    return [(torch.randn(24, generator=generator, **kind) * scale).view(shape).to(device) for shape in shapes]


def _cut(value: torch.Tensor) -> Tensors:
    flat = value.reshape(-1)
    return [flat[start:stop].clone() for start, stop in pairwise(_CUTS)]
