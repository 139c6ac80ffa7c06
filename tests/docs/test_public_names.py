"""The public surface is a list, and docs/contract.md tells the truth about the rest."""

from __future__ import annotations

import importlib
import inspect
import re
from importlib import metadata
from pathlib import Path

import shardstep
from repository import ROOT
from shardstep import zero_redundancy_optimizer as drop_in

# Every name by which the contract describes the system.
BEHAVIOURS = [
    "_broadcast_params_from_rank", "_build_param_buckets", "_clear_cache", "_device_to_params_per_rank",
    "_get_is_trainable_mask", "_get_min_index", "_get_optimizer_constructor", "_index_to_param",
    "_init_local_optimizer", "_param_to_index", "_param_to_rank", "_partition_param_group", "_partition_parameters",
    "_sync_param_groups", "_sync_params", "_verify_and_init_params", "_verify_params_per_rank",
    "_verify_same_dense_param_type", "_assign_bucket_subset_to_rank", "_build_ddp_param_buckets",
    "_check_overlap_initialized",
]  # fmt: skip


def test_public_names():
    names = ["Layout", "ShardConfig", "ShardedOptimizer", "ZeroRedundancyOptimizer", "load", "save", "shard"]
    assert shardstep.__all__ == names
    assert all(getattr(shardstep, name) is not None for name in shardstep.__all__)
    assert set(dir(shardstep)) >= {"ZeroRedundancyOptimizer", "__version__"}
    assert shardstep.ZeroRedundancyOptimizer is drop_in.ZeroRedundancyOptimizer
    assert shardstep.__version__ == metadata.version("shardstep")


def test_names_that_programs_import_from_the_module():
    for name in (
        "ZeroRedundancyOptimizer",
        "_ZeROJoinHook",
        "_DDPBucketAssignment",
        "_OverlapStatus",
        "_OverlapInfo",
        "_broadcast_object",
        "_recursive_copy_to_device",
        "_is_trainable",
    ):
        assert hasattr(drop_in, name), name


def test_the_constructor_takes_what_torchs_takes():
    parameters = list(inspect.signature(drop_in.ZeroRedundancyOptimizer.__init__).parameters.values())
    assert [p.name for p in parameters[1:6]] == [
        "params", "optimizer_class", "process_group", "parameters_as_bucket_view", "overlap_with_ddp",
    ]  # fmt: skip
    assert [p.default for p in parameters[3:6]] == [None, False, False]
    assert [p.name for p in parameters[6:] if p.kind is p.KEYWORD_ONLY] == [
        "allow_mixed_dtypes", "train_from_first_step",
    ]  # fmt: skip
    assert parameters[-1].kind is inspect.Parameter.VAR_KEYWORD


def places() -> dict[str, str]:
    rows = re.findall(r"^\| `(\w+)` \|[^|]*\| `([\w.]+)` \|", (ROOT / "docs" / "contract.md").read_text(), re.MULTILINE)
    return dict(rows)


def test_docs_contract_maps_every_name_to_a_place_that_exists():
    mapped = places()
    assert set(BEHAVIOURS) <= set(mapped), set(BEHAVIOURS) - set(mapped)
    for name, place in mapped.items():
        found = resolve(place)
        assert found is not None, f"{name}: {place} does not exist"


def resolve(place: str) -> object | None:
    parts = place.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module("shardstep." + ".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for attribute in parts[cut:]:
            if not hasattr(found, attribute):
                return None
            found = inspect.getattr_static(found, attribute)
        return found
    return None


def test_the_package_is_typed():
    assert (Path(shardstep.__file__).parent / "py.typed").exists()
