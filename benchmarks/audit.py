"""What `ShardConfig(audit=K)` costs: an audit reads every parameter once; 8 bytes for each are compared.

GPT-2's shapes on one device. An audit and a step of fused AdamW over the same parameters take turns; the ratio of the
two, divided by K, is what training becomes slower in step() by an audit every K steps.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

import torch
from gpu_one_rank import gpt2_shapes
from report import Grid, Report, Spread, make_console
from torch import optim

from shardstep.state.audit import checksum, to_host

EPILOG = """\
  python benchmarks/audit.py           a minute: 124 M parameters; on a GPU, if there is one, 1.6 G
  python benchmarks/audit.py --quick   a toy model: shows that everything runs

Results go to benchmarks/results/audit_<device>.md and .json. Exit status: 0.
"""
METHOD = "One process. Each time ends by waiting for the device. Medians and quartiles over the rounds."
SIZES = {"cpu": (12, 768, 50257, 1024), "cuda": (48, 1600, 50257, 1024), "quick": (2, 64, 500, 64)}


def seconds(what: Callable[[], object], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    what()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=10, help="of each, in turn (default: 10)")
    parser.add_argument("--quick", action="store_true", help="a toy model; numbers mean nothing")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shapes = list(gpt2_shapes(*SIZES["quick" if arguments.quick else device]))
    params = [torch.randn(shape, device=device).mul_(0.02).requires_grad_() for shape in shapes]
    for param in params:
        param.grad = torch.randn_like(param)
    optimizer = optim.AdamW(params, lr=1e-4, fused=True)

    def audit() -> None:
        to_host([checksum(param.detach()) for param in params])

    for warm in (audit, optimizer.step):
        seconds(warm, device)
    rows = [(seconds(audit, device), seconds(optimizer.step, device)) for _ in range(arguments.rounds)]
    numel = sum(param.numel() for param in params)
    audits, ratios = Spread.of([1e3 * one for one, _ in rows]), Spread.of([one / other for one, other in rows])
    grid = Grid(
        "An audit",
        "GB/s are of the parameters' bytes. The ratio is to a step of fused AdamW over the same parameters.",
        ("parameters", "ms", "GB/s", "ratio to a step", "quartiles"),
        (
            (
                f"{numel / 1e6:,.0f} M in {len(params)} tensors",
                f"{audits.median:.2f}",
                f"{4e-6 * numel / audits.median:.0f}",
                f"{ratios.median:.2f}",
                f"{ratios.lower_quartile:.2f} to {ratios.upper_quartile:.2f}",
            ),
        ),
    )
    report = Report(f"audit_{device}", "The cost of an audit", METHOD, (grid,), (), {"rows": rows})
    return report.publish(make_console(), quick=arguments.quick)


if __name__ == "__main__":
    sys.exit(main())
