"""What `consolidate_state_dict` brought here, for as long as it is the optimizer's state."""

from __future__ import annotations

from typing import Any


class SavedState:
    """All ranks' state, on the rank it was consolidated to. Dropped as soon as it is old; it is memory, too."""

    def __init__(self) -> None:
        self._steps = 0
        self._state: dict[Any, Any] | None = None
        self._why_not = "was never consolidated"
        self.is_here = False
        self.is_new = True  # nothing was stepped or loaded: there is no state on any rank

    def keep(self, state: dict[Any, Any] | None, to: int) -> None:
        """What a consolidation to rank `to` gave this rank: nothing, if it is another."""
        self._state, self._why_not = state, f"was consolidated to rank {to}"
        self.is_here = state is not None

    def lose(self, why: str) -> None:
        """The state has moved on."""
        if self._state is not None:
            self._state, self._why_not, self.is_here = None, why, False

    def loaded(self, *, empty: bool = False) -> None:
        """`empty`: of a state_dict without state, so that again no rank has any."""
        self.is_new = empty
        self.lose("was consolidated before a state was loaded")

    def stepped(self, what: str) -> None:
        self.is_new = False
        self.lose(f"was consolidated at step {self._steps}, and {what} was taken since")
        self._steps += 1

    def read(self, rank: int) -> dict[Any, Any]:
        """In index order, then what belongs to no parameter; `rank` is this one."""
        if self._state is None:
            raise RuntimeError(
                f"rank {rank} does not have the optimizer's state: it {self._why_not}. "
                f"Call consolidate_state_dict(to={rank}) on all ranks, then state_dict() on rank {rank}"
            )
        in_order = sorted(key for key in self._state if isinstance(key, int))
        others = [key for key in self._state if not isinstance(key, int)]
        return {key: self._state[key] for key in [*in_order, *others]}
