"""What must hold before a step: the model still has its parameters, and all ranks have the same options and buffers.

A rank on which something differs would raise alone, or step with a learning rate of its own. So every rank sends a
digest of all of it before a step. Where digests differ, the ranks exchange the texts behind them and raise, before any
weight has changed.

[Note: cost] The check runs in every step, over thousands of parameters. `model.parameters()` takes two milliseconds for
2,000 of them; comparing each with the object that was there before takes a tenth of that.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from operator import is_
from typing import Any

import torch
from torch import nn

from shardstep.optimizers.param_groups import Groups, WatchedOptions

NBYTES = 8  # of a digest


class StepPreconditions:
    """The preconditions of one optimizer. `buffers` are those that are sent from rank 0, as of the last check."""

    def __init__(self, model: nn.Module, *, has_buffers: bool) -> None:
        self._model, self._has_buffers = model, has_buffers
        self._options = WatchedOptions()
        self.failure: Exception | None = None
        self._found: list[torch.Tensor | None] = []
        self.buffers: list[torch.Tensor] = []
        self._buffer_lines: list[str] = []
        self._checked: tuple[list[str], list[str], str, list[str]] | None = None  # what the digest was made of
        self._digest = b""

    def watch(self, groups: Groups) -> None:
        """Expect the model to keep those parameters of `groups` that it has now."""
        self._options.add_new(groups)
        known = {param for group in groups for param in group["params"]}
        self._names = {name: param for name, param in self._model.named_parameters() if param in known}
        self._watch_places()

    def _watch_places(self) -> None:
        """Note where each parameter and each module is found: a dict, and the name in it."""
        modules = list(self._model.modules())
        known = set(self._names.values())
        places: list[tuple[dict[str, Any], str, Any]] = [
            (module._parameters, name, param)
            for module in modules
            for name, param in module._parameters.items()
            if param in known
        ]
        places += [(module._modules, name, inner) for module in modules for name, inner in module._modules.items()]
        self._dicts = [found for found, _, _ in places]
        self._keys = [name for _, name, _ in places]
        self._members = [member for _, _, member in places]
        watched = modules if self._has_buffers else []
        self._buffer_dicts = [module._buffers for module in watched]
        self._module_dicts = [module._modules for module in watched]
        self._module_counts = list(map(len, self._module_dicts))

    # -- in every step ------------------------------------------------------------------------------------------------

    def look(self, groups: Groups, failure: Exception | None, changes: list[str]) -> bytes:
        """Return a digest of what must be equal on all ranks, including why this one cannot step.

        That is `failure`, or a parameter of the model that was replaced. `changes` say which parameters were frozen or
        unfrozen since the plan was made.
        """
        self.failure = failure
        if not all(map(is_, map(dict.get, self._dicts, self._keys), self._members)):
            self.failure = failure or self._find_replaced(groups)
        self._look_at_buffers()
        found = (self._options.lines(groups), self._buffer_lines, repr(self.failure), changes)
        if self._checked is None or found[0] is not self._checked[0] or found[1:] != self._checked[1:]:
            self._checked = found
            self._digest = hashlib.blake2b("\n".join(self.lines()).encode(), digest_size=NBYTES).digest()
        return self._digest

    def lines(self) -> Iterator[str]:
        """Yield the lines behind the digest."""
        options, buffers, failure, changes = self._checked or ([], [], "", [])
        yield from options
        yield from buffers
        yield from changes
        yield failure

    def all_options(self, groups: Groups) -> list[str]:
        """Return a line for each option, including tensors on a device, for which the host waits."""
        return self._options.all_lines(groups)

    def _find_replaced(self, groups: Groups) -> Exception | None:
        """Return an error if a parameter was replaced by one that nobody steps; None if it only left the model."""
        now = dict(self._model.named_parameters())
        present, stepped = set(now.values()), {param for group in groups for param in group["params"]}
        gone = [name for name, param in self._names.items() if param not in present]
        unknown = [name for name, param in now.items() if param.requires_grad and param not in stepped]
        if not gone:
            self._watch_places()
            return None
        if not unknown:
            return None
        others = f" and {len(unknown) - 1} others" if len(unknown) > 1 else ""
        return RuntimeError(
            f"the model's {unknown[0]}{others} came after shard(...), and {gone[0]}, which this optimizer steps, is no "
            "longer in the model: it was replaced by an assignment, a new module or load_state_dict(assign=True), and "
            "what replaced it would not be trained. Build the optimizer again: call shard(...) on the model as it is"
        )

    def _look_at_buffers(self) -> None:
        if list(map(len, self._module_dicts)) != self._module_counts:  # a module was added, perhaps with buffers
            self._watch_places()
        found = [buffer for buffers in self._buffer_dicts for buffer in buffers.values()]
        if len(found) == len(self._found) and all(map(is_, found, self._found)):
            return
        named = dict(self._model.named_buffers())
        self._found, self.buffers = found, list(named.values())
        self._buffer_lines = [
            f"{name}: a buffer of shape {tuple(buffer.shape)}, {buffer.dtype} (sync_buffers=False leaves buffers alone)"
            for name, buffer in named.items()
        ]
