"""What a shell proposes for an option that takes one of a few words."""

from __future__ import annotations

from collections.abc import Callable, Iterable


def one_of(words: Iterable[str]) -> Callable[[str], list[str]]:
    def proposals(incomplete: str) -> list[str]:
        return [word for word in words if word.startswith(incomplete)]

    return proposals
