"""The text that the demo's model learns, and batches of it: one token per character.

A small grammar and a fixed seed make the text when it is asked for. The only source of chance is `Random.random()`,
whose sequence Python promises to keep for a given seed; `choice` and `shuffle` carry no such promise.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

SEED = 1871
NUM_CHARACTERS = 320_000


@dataclass(frozen=True, slots=True)
class Corpus:
    characters: str  # the character that token i stands for is characters[i]
    tokens: Tensor  # the whole text, int64


def load_corpus() -> Corpus:
    """Make the demo's text and turn it into tokens; the result is the same on every rank."""
    text = make_text()
    characters = "".join(sorted(set(text)))
    token_of = {character: token for token, character in enumerate(characters)}
    return Corpus(characters, torch.tensor([token_of[character] for character in text]))


def draw_batches(corpus: Corpus, *, batch: int, block: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless (tokens, the tokens that follow them), each (batch, block), the same sequence for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.arange(block + 1)
    while True:
        starts = torch.randint(len(corpus.tokens) - block, (batch, 1), generator=generator)
        windows = corpus.tokens[starts + offsets]
        yield windows[:, :-1], windows[:, 1:]


def make_text() -> str:
    """Return 320,098 characters of paragraphs about ships and harbours; that takes a tenth of a second."""
    random = Random(SEED).random

    def expand(name: str) -> str:
        line = GRAMMAR[name][int(random() * len(GRAMMAR[name]))]
        text = re.sub(r"\{(\w+)\}", lambda match: expand(match[1]), line)
        return text[0].upper() + text[1:] if name == "sentence" else text

    text = ""
    while len(text) < NUM_CHARACTERS:
        if random() < 0.1:
            text += "\n".join(expand("ledger") for _ in range(int(random() * 3) + 2))
        else:
            text += " ".join(expand("sentence") for _ in range(int(random() * 4) + 3))
        text += "\n\n"
    return text[:-1]


# A name in braces stands for any one line under that name.
GRAMMAR: dict[str, tuple[str, ...]] = {
    "sentence": (
        "{dawn} the {ship} {came} {harbour} with {cargo}.",
        "{dawn} the {ship} lay {where}, {waiting}.",
        "The {person} of the {ship} {said} that {news}.",
        "The {person} {said} that {news}, and {reply}.",
        "{weather}, and the {person} {did}.",
        "{weather}; {weather2}.",
        "When {weather2}, the {person} {did}.",
        "No ship {came} {harbour} while {weather2}.",
        "They sold {cargo} for {number} {coins}, {bargain}.",
        "The price of {goods} {moved} {when}, because {news}.",
        "From {harbour} to {harbour} is {number} days with {wind} and {number} without it.",
        "“{speech},” said the {person}. “{speech}.”",
        "“{speech}?” asked the {person}, but the {person} {did}.",
        "In the {place} an old {person} {did} and told how {news}.",
        "{number} {crew} {did2} {where} until {weather2}.",
        "It was {number} days since the {ship} had left {harbour}, and {news}.",
        "If {weather2}, {news}; if not, {reply}.",
        "Nobody in {harbour} had {seen} such {goods} before.",
    ),
    "ledger": (
        "{ship}, from {harbour}: {cargo}; paid {number} {coins}.",
        "{ship}, to {harbour}: {cargo}; owed {number} {coins}.",
        "{ship}, {where}: {waiting}.",
    ),
    "dawn": (
        "At first light", "Before noon", "Late in the evening", "On the third day", "After the storm", "At high water",
        "With the morning tide", "In the first week of spring", "On a grey afternoon", "Shortly after midnight",
    ),
    "ship": (
        "Patient Heron", "Grey Margaret", "Second Winter", "Copper Lantern", "Widow's Thimble", "North Star of Velm",
        "Good Intent", "Salt Daughter", "Merry Anvil", "Juniper", "Old Promise", "Quiet Fox", "Zealous Kate",
    ),
    "harbour": (
        "Velm", "Osterhaven", "Port Quill", "Marrow Bay", "Tarn Ferry", "Kessel", "Whitegate", "Lower Brine", "Dunmere",
        "Saint Ivo's Quay", "Harrowmouth", "Fenwick Sound",
    ),
    "came": ("came into", "put in at", "sailed for", "crept round the point to", "ran before the wind to", "made for"),
    "cargo": (
        "{number} {measure} of {goods}", "{goods} and {goods}", "a hold full of {goods}", "nothing but {goods}",
        "{number} {measure} of {goods} and some {goods}", "more {goods} than the {person} had ordered",
    ),
    "measure": ("barrels", "sacks", "crates", "bales", "casks", "chests", "bundles", "jars"),
    "goods": (
        "salt", "dried cod", "barley", "blue wool", "tin", "honey", "cedar planks", "lamp oil", "rope", "black tea",
        "oranges", "window glass", "pepper", "copper nails", "candles", "rye flour", "sailcloth", "smoked eel", "tar",
    ),
    "number": (
        "two", "three", "four", "five", "six", "seven", "nine", "eleven", "twelve", "fifteen", "twenty", "thirty-one",
        "forty", "sixty", "eighty-two", "a hundred",
    ),
    "coins": ("crowns", "silver marks", "shillings", "pennies a pound", "guilders", "pieces of eight"),
    "person": (
        "harbour master", "pilot", "cook", "captain", "sailmaker", "fishwife", "customs clerk", "lighthouse keeper",
        "rope merchant", "first mate", "cooper", "carpenter", "miller's daughter", "ferryman", "net mender",
    ),
    "crew": ("sailors", "rowers", "dockhands", "apprentices", "fishermen", "passengers", "gulls", "small boats"),
    "where": (
        "off {harbour}", "at anchor in {harbour}", "beside the long pier", "under the lighthouse", "beyond the sandbar",
        "in the lee of the island", "at the end of the quay", "between the buoys",
    ),
    "waiting": (
        "waiting for {wind}", "waiting for the tide", "loading {goods}", "her sails furled and wet", "short of {crew}",
        "mending what the storm had broken", "with a lantern at the mast", "taking in water and {goods}",
    ),
    "said": ("said", "swore", "wrote home", "told the {person}", "remembered", "complained", "was sure", "heard"),
    "news": (
        "{wind} would hold until {harbour}", "the {ship} was lost off {harbour}", "there was no {goods} in {harbour}",
        "the {person} had gone to sea", "{goods} would be dear before winter", "the {person} owed {number} {coins}",
        "the channel at {harbour} was silting up", "the {ship} carried {cargo}", "{number} {crew} had seen land",
        "the light at {harbour} was out", "the ice had closed {harbour}", "the {ship} leaked like a basket",
    ),
    "reply": (
        "the {person} laughed", "nobody believed it", "the {person} poured another cup", "so they reefed the sails",
        "they drank to the {ship}", "the {person} wrote it in the book", "the anchor stayed where it was",
        "all hands were called on deck", "it turned out to be true",
    ),
    "weather": (
        "Fog lay on the water for {number} days", "The wind went round to the north",
        "Rain fell on {harbour} all night", "The barometer dropped by {number} points",
        "A long swell came in from the west", "The morning was clear and cold",
        "Thunder rolled over the hills behind {harbour}", "The sea was as flat as a plate", "Snow covered the yards",
    ),
    "weather2": (
        "the fog lifted", "the gale blew itself out", "the tide turned", "the moon rose over {harbour}", "{wind} died",
        "the clouds broke in the east", "the ice went out", "the rain stopped", "the waves came over the wall",
        "{wind} freshened", "the frost held",
    ),
    "wind": (
        "a fair wind", "the west wind", "a light breeze", "the night wind", "a steady wind from the south",
        "the trade wind",
    ),
    "did": (
        "went below", "counted the {goods}", "looked for the {ship}", "lit the lamps", "rang the bell", "slept",
        "signed for {number} {measure}", "bought {goods} from the {person}", "said nothing", "sent for the {person}",
        "sang of {harbour}", "took the helm", "shook {number} {coins} out of a boot",
    ),
    "did2": ("waited", "sang", "hauled {goods}", "quarrelled over {goods}", "kept watch", "rowed in circles", "rested"),
    "bargain": (
        "which was too little", "and the {person} kept the change", "half of it in {goods}",
        "as they had agreed in {harbour}", "to the great surprise of the {person}", "before the {ship} was even moored",
        "and shook hands on it",
    ),
    "moved": ("rose", "fell", "rose by {number} {coins}", "fell by half", "doubled", "did not change"),
    "when": ("overnight", "in {harbour}", "that week", "after the fair", "before the ice came", "twice in one day"),
    "speech": (
        "Have you any {goods} left", "The {ship} is late again", "You can smell {harbour} from here",
        "Mind the {goods}", "Is that the {ship}", "I would not sail in this for {number} {coins}", "Ask the {person}",
        "We leave with the tide", "There is always work in {harbour}", "My father was {person} on the {ship}",
        "Make fast and come ashore",
    ),
    "place": ("tavern", "chandler's shop", "customs house", "rope walk", "fish market", "counting house", "boat shed"),
    "seen": ("seen", "tasted", "paid for", "asked for", "heard of", "stored"),
}  # fmt: skip
