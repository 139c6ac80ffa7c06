"""Imports point down: planning < comm < params < gradients, optimizers < stepping < state < engine < surfaces <
checkpoint, convert, integrations, cli.

Read from the source; nothing is imported."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from repository import ROOT

SOURCE = ROOT / "src" / "shardstep"
ORDER = ["format", "torch_internals", "planning", "comm", "params", "gradients", "optimizers", "stepping", "state",
         "config", "engine", "optimizer", "drop_in", "zero_redundancy_optimizer", "ddp_zero_hook",
         "checkpoint", "convert", "integrations", "cli", "__main__"]  # fmt: skip
FILES = sorted(path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py")


def layer_of(module: str) -> str:
    return module.split(".")[1] if "." in module else "shardstep"


def imports_of(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the direction"
            found |= {node.module or ""}
    return found


def names_called(path: Path) -> set[str]:
    """`dist.x` for every attribute of torch.distributed that is used."""
    return {
        node.attr
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "dist"
    }


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_down(path):
    own = path.relative_to(SOURCE).with_suffix("").parts[0]
    for module in imports_of(path):
        if module.split(".")[0] == "shardstep" and layer_of(module) != "shardstep":
            assert ORDER.index(layer_of(module)) <= ORDER.index(own), f"{own} imports {module}, which lies above it"


def test_every_part_has_its_place_in_the_order():
    parts = {path.relative_to(SOURCE).with_suffix("").parts[0] for path in FILES}
    assert parts == set(ORDER)


def test_planning_knows_neither_torch_nor_processes():
    for path in (SOURCE / "planning").glob("*.py"):
        assert not {module for module in imports_of(path) if module.split(".")[0] == "torch"}, path


MESSAGES = {"broadcast", "all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_single", "reduce", "gather",
            "reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single", "all_to_all", "all_to_all_single",
            "scatter", "send", "recv", "isend", "irecv", "barrier", "batch_isend_irecv", "broadcast_object_list",
            "all_gather_object", "gather_object"}  # fmt: skip


def test_only_comm_sends_messages():
    library = [path for path in FILES if path.relative_to(SOURCE).parts[0] != "cli"]
    senders = {path.relative_to(SOURCE).parts[0] for path in library if names_called(path) & MESSAGES}
    assert senders == {"comm"}


def test_nothing_above_comm_asks_which_backend_it_has():
    for path in FILES:
        if path.relative_to(SOURCE).parts[0] not in ("comm", "cli"):
            text = path.read_text().replace("torch._dynamo.backends", "")  # the compiler's
            assert not any(word in text for word in ("backends", '"gloo"', '"nccl"', "takes_many_messages")), path


def test_gradients_and_stepping_do_not_know_each_other():
    for one, other in (
        ("gradients", "stepping"),
        ("stepping", "gradients"),
        ("gradients", "optimizers"),
        ("optimizers", "gradients"),
    ):
        for path in (SOURCE / one).glob("*.py"):
            assert not any(layer_of(module) == other for module in imports_of(path) if "shardstep." in module), path


# torch's `.metadata` is a pickle: one writes it, and one reads it, by an unpickler that finds a few classes only.
PICKLES = {
    "checkpoint/storage.py": {"pickle.dump", "pickle.UnpicklingError"},
    "convert/unpickling.py": {"pickle.Unpickler", "pickle.UnpicklingError"},
}


def test_nothing_is_pickled_or_unpickled_without_weights_only():
    for path in FILES:
        text = path.read_text()
        used = {
            ast.unparse(node)
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "pickle"
        }
        assert used == PICKLES.get(str(path.relative_to(SOURCE)), set()), path
        assert "from pickle" not in text, path
        assert ("import pickle" in text) == bool(used), path
        assert "weights_only=False" not in text, path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                assert any(keyword.arg == "weights_only" for keyword in node.keywords), path


def test_formats_of_others_are_known_to_convert_alone():
    for path in FILES:
        if path.relative_to(SOURCE).parts[0] not in ("convert", "cli"):
            assert "shardstep.convert" not in path.read_text(), path


def test_a_format_is_recognised_without_torch():
    for name in ("detect.py", "__init__.py"):
        assert not {module for module in imports_of(SOURCE / "convert" / name) if module.split(".")[0] == "torch"}


def test_no_private_helper_of_torchs_own_class_is_imported():
    for path in [*FILES, *(ROOT / "tests").rglob("*.py")]:
        for module in imports_of(path):
            assert not module.startswith("torch.distributed.optim.zero_redundancy_optimizer"), path
