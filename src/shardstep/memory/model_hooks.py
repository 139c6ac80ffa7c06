"""Hooks that a model carries while it is sharded, and that its copies do not."""

from __future__ import annotations

from typing import Any


class ModelHook:
    """A copy of the model, or one that was saved, has a hook in its place that does nothing.

    A function made inside another, as hooks often are, would keep the model from being pickled; and what a copy
    computes is not ours to wait for or to reduce.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return (_Nothing, ())


class _Nothing:
    """A hook that does nothing, before a forward or after it."""

    def __call__(self, *_: Any) -> None:
        return None
