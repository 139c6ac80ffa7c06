"""Writes safetensors: the weights, and the state if wanted, as one file or several with an index.

The safetensors package writes from tensors that are all in memory. The format is eight bytes of length, a header in
JSON and the bytes of the tensors one after the other, so it is written here, one tensor after the other; a test reads
the result with the package.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from shardstep.checkpoint.contents import STATE
from shardstep.checkpoint.folder import sync
from shardstep.convert.source import Lazy, Source, SourceError
from shardstep.convert.target import Target

Told = Callable[[int], None]
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
ONE, SUFFIX, INDEX = "model.safetensors", ".safetensors", "model.safetensors.index.json"
_ALIGNMENT = 8


def write(source: Source, target: Target, told: Told, *, with_state: bool, shard_nbytes: int) -> None:
    """A file if its name says so, else a folder as Hugging Face has them."""
    tensors = dict(_named(source, with_state=with_state))
    # One of two tied names is stored, and the header says which: the package's own `load_model` wants it so.
    metadata = {"format": "pt", **source.tied}
    if target.path.suffix == SUFFIX:
        _write_file(target.partial, tensors, metadata, told)
        return
    target.partial.mkdir()
    shards = list(_shards(tensors, shard_nbytes))
    if len(shards) == 1:
        _write_file(target.partial / ONE, tensors, metadata, told)
        return
    places: dict[str, str] = {}
    for number, keys in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}{SUFFIX}"
        _write_file(target.partial / name, {key: tensors[key] for key in keys}, metadata, told)
        places |= dict.fromkeys(keys, name)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (target.partial / INDEX).write_text(json.dumps(index, indent=2))
    sync(target.partial / INDEX)


def left_out(source: Source, *, with_state: bool) -> list[str]:
    """What the format has no place for, in words."""
    found = []
    if source.groups and not with_state:
        found.append("the optimizer's state and options (--with-state takes the state's tensors)")
    elif source.groups:
        found.append("the optimizer's options")
        if any(one.values for one in source.trained.values()):
            found.append("what its state has beside tensors")
    if source.extra or source.extra_of_ranks:
        found.append("extra")
    if source.others:
        found.append(f"what is no tensor in the model ({', '.join(list(source.others)[:3])})")
    return found


def _named(source: Source, *, with_state: bool) -> Iterator[tuple[str, Lazy]]:
    for key, tensor in source.weights():
        yield key, _known(key, tensor)
    for name, key, tensor in source.state() if with_state else ():
        full = f"{STATE}{name}.{key}"
        yield full, _known(full, tensor)


def _known(key: str, tensor: Lazy) -> Lazy:
    if tensor.dtype not in DTYPES:
        raise SourceError(f"{key} is of {tensor.dtype}, which safetensors does not have")
    return tensor


def _shards(tensors: Mapping[str, Lazy], most: int) -> Iterator[Sequence[str]]:
    """In order; one that is larger than a shard has one of its own."""
    keys: list[str] = []
    nbytes = 0
    for key, tensor in tensors.items():
        if keys and nbytes + tensor.nbytes > most:
            yield keys
            keys, nbytes = [], 0
        keys.append(key)
        nbytes += tensor.nbytes
    yield keys


def _write_file(path: Path, tensors: Mapping[str, Lazy], metadata: Mapping[str, str], told: Told) -> None:
    # Wide dtypes first, as the package does it: so every tensor begins at a multiple of its element's size.
    order = sorted(tensors, key=lambda key: -tensors[key].dtype.itemsize)
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    place = 0
    for key in order:
        one = tensors[key]
        header[key] = {
            "dtype": DTYPES[one.dtype],
            "shape": list(one.shape),
            "data_offsets": [place, place + one.nbytes],
        }
        place += one.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for key in order:
            if tensors[key].numel:
                values = tensors[key].read().reshape(-1).view(torch.uint8)
                file.write(values.numpy().data)
                told(tensors[key].nbytes)
    sync(path)
