"""What a checkpoint takes as `extra`, and how it refuses the rest: by its place, and with what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardstep
from training import raised


def odd_tensors() -> dict[str, Any]:
    """Tensors whose memory is not what they show."""
    wave = torch.tensor([1 + 2j, 3 - 4j])
    return {"conjugate": wave.conj(), "negated": wave.conj().imag}


def without_a_way() -> dict[str, tuple[Any, str]]:
    """What cannot be saved, and what the error says of it."""
    endless: list[Any] = [1]
    endless.append({"again": endless})
    loop: dict[str, Any] = {}
    loop["self"] = loop
    sparse = torch.eye(2).to_sparse()
    with torch.no_grad():
        quantized = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    return {
        "meta": (torch.ones(2, device="meta"), "meta device, which has no values: put it on a device"),
        "quantized": (quantized, "quantized tensor: keep its int_repr()"),
        "sparse": (sparse, "use a plain dense tensor"),
        "endless": (endless, "['endless'][1]['again'] contains itself"),
        "loop": (loop, "['loop']['self'] contains itself"),
    }


def saves_extras(folder: str) -> list[tuple[str, str]]:
    model = nn.Linear(2, 2)
    shared = [1, 2]
    extra = {**odd_tensors(), "twice": [shared, shared]}
    shardstep.save(f"{folder}/whole", model, extra=extra, extra_of_rank=extra)
    loaded = shardstep.load(f"{folder}/whole", model)
    for found in (dict(loaded), loaded.own):
        assert torch.equal(found["conjugate"], extra["conjugate"])
        assert torch.equal(found["negated"], extra["negated"])
        assert found["twice"] == [[1, 2], [1, 2]]
    found = []
    for name, (value, _) in without_a_way().items():
        for option in ("extra", "extra_of_rank"):
            found.append(raised(lambda name=name, value=value, option=option: shardstep.save(
                f"{folder}/none", model, **{option: {name: value}}
            )))  # fmt: skip
    return found


@pytest.mark.filterwarnings("ignore:.*[Qq]uantiz", "ignore:.*quantize_per_tensor", "ignore:Sparse invariant")
@pytest.mark.parametrize("ranks", [1, 2])
def test_extra_with_odd_tensors_or_itself_inside_is_saved_or_refused_with_what_to_do(workers, tmp_path, ranks):
    for found in workers(ranks).run(saves_extras, str(tmp_path), timeout=60):
        expected = [words for _, words in without_a_way().values() for _ in range(2)]
        for (kind, text), words in zip(found, expected, strict=True):
            assert kind == "TypeError"
            assert words in text
    assert [path.name for path in Path(tmp_path).iterdir()] == ["whole"]
