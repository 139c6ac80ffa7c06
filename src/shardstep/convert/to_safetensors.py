"""Write the weights, and the state if wanted, to one file of safetensors, or to several with an index.

The safetensors package can only write tensors that are all in memory, so the format is written here, one tensor at a
time: eight bytes with the header's length, a JSON header, and the bytes of the tensors. A test reads the result with
the package.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from shardstep.checkpoint.contents import STATE
from shardstep.checkpoint.folder import sync
from shardstep.convert.source import LazyTensor, OnBytes, Source, SourceError
from shardstep.convert.target import Target

DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
ONE, SUFFIX, INDEX = "model.safetensors", ".safetensors", "model.safetensors.index.json"
_ALIGNMENT = 8


def write(source: Source, target: Target, on_bytes: OnBytes, *, with_state: bool, shard_nbytes: int) -> None:
    """Write one file if the path ends with .safetensors, else a folder in the form of Hugging Face."""
    tensors = dict(_named(source, with_state=with_state))
    # A tied tensor is stored under one name; the header maps the others to it, as the package's `load_model` needs.
    metadata = {"format": "pt", **source.tied}
    if target.path.suffix == SUFFIX:
        _write_file(target.partial, tensors, metadata, on_bytes)
        return
    target.partial.mkdir()
    shards = list(_shards(tensors, shard_nbytes))
    if len(shards) == 1:
        _write_file(target.partial / ONE, tensors, metadata, on_bytes)
        return
    file_of: dict[str, str] = {}
    for number, keys in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}{SUFFIX}"
        _write_file(target.partial / name, {key: tensors[key] for key in keys}, metadata, on_bytes)
        file_of |= dict.fromkeys(keys, name)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": file_of}
    (target.partial / INDEX).write_text(json.dumps(index, indent=2))
    sync(target.partial / INDEX)


def list_omissions(source: Source, *, with_state: bool) -> list[str]:
    """Return descriptions of what is not written."""
    found = []
    if source.groups and not with_state:
        found.append("the optimizer's state and options (--with-state writes the state's tensors)")
    elif source.groups:
        found.append("the optimizer's options")
        if any(one.values for one in source.trained.values()):
            found.append("its state that is not a tensor")
    if source.extra or source.extra_of_ranks:
        found.append("extra")
    if source.others:
        found.append(f"values of the model that are not tensors ({', '.join(list(source.others)[:3])})")
    return found


def _named(source: Source, *, with_state: bool) -> Iterator[tuple[str, LazyTensor]]:
    for key, tensor in source.weights():
        yield key, _check_dtype(key, tensor)
    for name, key, tensor in source.state() if with_state else ():
        full = f"{STATE}{name}.{key}"
        yield full, _check_dtype(full, tensor)


def _check_dtype(key: str, tensor: LazyTensor) -> LazyTensor:
    if tensor.dtype not in DTYPES:
        raise SourceError(f"{key} is of {tensor.dtype}, which safetensors does not have: convert it to torch or dcp")
    return tensor


def _shards(tensors: Mapping[str, LazyTensor], most: int) -> Iterator[Sequence[str]]:
    """Yield the keys of each file, in order; a tensor that is larger than `most` has a file of its own."""
    keys: list[str] = []
    nbytes = 0
    for key, tensor in tensors.items():
        if keys and nbytes + tensor.nbytes > most:
            yield keys
            keys, nbytes = [], 0
        keys.append(key)
        nbytes += tensor.nbytes
    yield keys


def _write_file(path: Path, tensors: Mapping[str, LazyTensor], metadata: Mapping[str, str], on_bytes: OnBytes) -> None:
    # Wide dtypes first, as the package does: then every tensor begins at a multiple of its element size.
    order = sorted(tensors, key=lambda key: -tensors[key].dtype.itemsize)
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    offset = 0
    for key in order:
        one = tensors[key]
        header[key] = {
            "dtype": DTYPES[one.dtype],
            "shape": list(one.shape),
            "data_offsets": [offset, offset + one.nbytes],
        }
        offset += one.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for key in order:
            if tensors[key].numel:
                values = tensors[key].read().reshape(-1).view(torch.uint8)
                file.write(values.numpy().data)
                on_bytes(tensors[key].nbytes)
    sync(path)
