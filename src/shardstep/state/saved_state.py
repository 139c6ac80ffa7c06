"""Keep the state that `consolidate_state_dict` collected until the optimizer's state changes."""

from __future__ import annotations

from typing import Any


class SavedState:
    """All ranks' state, on the rank to which it was consolidated. It is released as soon as it is out of date."""

    def __init__(self) -> None:
        self._steps = 0
        self._state: dict[Any, Any] | None = None
        self._why_not = "was never consolidated"
        self.is_here = False
        self.is_new = True  # no step was taken and no state loaded: no rank has any state

    def keep(self, state: dict[Any, Any] | None, to: int) -> None:
        """Store the result of a consolidation to rank `to`; it is None on all other ranks."""
        self._state, self._why_not = state, f"was consolidated to rank {to}"
        self.is_here = state is not None

    def lose(self, why: str) -> None:
        """Release the stored state, because the optimizer's state has changed; `why` is for the error in `read`."""
        if self._state is not None:
            self._state, self._why_not, self.is_here = None, why, False

    def loaded(self, *, empty: bool = False) -> None:
        """Note that a state_dict was loaded; `empty` says that it had no state, so that no rank has any."""
        self.is_new = empty
        self.lose("was consolidated before a state was loaded")

    def stepped(self, what: str) -> None:
        """Note that a step was taken; `what` describes it in the error of `read`."""
        self.is_new = False
        self.lose(f"was consolidated at step {self._steps}, and {what} was taken since")
        self._steps += 1

    def read(self, rank: int) -> dict[Any, Any]:
        """Return the stored state: entries of parameters in index order, then the others. `rank` is this rank.

        Raises RuntimeError if this rank has no stored state, or if it is out of date.
        """
        if self._state is None:
            raise RuntimeError(
                f"rank {rank} does not have the optimizer's state: it {self._why_not}. "
                f"Call consolidate_state_dict(to={rank}) on all ranks, then state_dict() on rank {rank}"
            )
        in_order = sorted(key for key in self._state if isinstance(key, int))
        others = [key for key in self._state if not isinstance(key, int)]
        return {key: self._state[key] for key in [*in_order, *others]}
