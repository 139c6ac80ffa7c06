"""Every optimizer of other packages: trained like the plain one, or refused with a reason. `make test-third-party`."""

from __future__ import annotations

import importlib.util
import re

import pytest

from shardstep.optimizers.layout_policy import ELEMENTWISE
from shardstep.optimizers.local_optimizer import qualified_name
from third_party import PACKAGES, TABLE, Row, classes_of, jobs, render, tolerance, try_package

_absent = [package for package in PACKAGES if importlib.util.find_spec(package.partition(".")[0]) is None]
if _absent:
    pytest.skip(f"not installed: {', '.join(_absent)}; make test-third-party installs them", allow_module_level=True)

# What these packages warn of, when they are imported or built, is their own affair.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(320)]

REASONS = (
    r"\w+ treats all parameters together \(.+\), so that stepping them on several ranks would silently compute",
    r"\w+ draws random numbers: .+ differs under another seed",
    r"\w+ talks to other ranks itself \(.+ in its step\)",
    r"\w+ computes one line search and one direction over all parameters together",
    r"\w+ refuses tiny tensors of shapes .+So it cannot be tried whether it treats parameters separately",
    r"is not built from param groups: \w+: .+",  # by the class itself: it wraps another optimizer, or a model
)


def assert_equal_or_refused(row: Row) -> None:
    if row.layout == "refused":
        assert any(re.match(reason, row.reason) for reason in REASONS), row
    else:
        assert row.difference <= tolerance(row.path), row
    assert row.drop_in in ("equal", "refused"), row
    assert row.drop_in == "equal" or row.drop_in_reason, row
    if row.path in ELEMENTWISE:
        assert row.layout == "FLAT", f"{row.path} is on the list of those that are cut: {row}"


@pytest.mark.parametrize("job", jobs(), ids=lambda job: f"{job[0]}-{job[1] + 1}")
def test_every_class_trains_like_the_plain_one_or_is_refused_with_the_reason(workers, job):
    by_rank = workers(2).run(try_package, *job, timeout=300)
    lines = TABLE.read_text().splitlines()
    for rows in by_rank:
        for row in rows:
            assert_equal_or_refused(row)
            assert render(row) in lines, "docs/optimizers.md is not what is found now: make third-party-table"


def test_every_class_on_the_list_of_known_ones_exists():
    shown = {qualified_name(kind) for package in PACKAGES for kind in classes_of(package).values()}
    assert not ELEMENTWISE - shown
