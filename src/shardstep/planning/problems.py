"""Check that a plan is a partition: each element is held once, and no bucket mixes what cannot be sent together."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, chain, pairwise

from shardstep.planning.plan import Bucket, Plan, Segment, WholeRanges


def find_problems(plan: Plan) -> list[str]:
    """Return all problems of `plan` as sentences; an empty list if it is a partition."""
    missing = [
        f"{segment} names a parameter that does not exist"
        for bucket in chain(plan.buckets, plan.parked)
        for segment in bucket.segments
        if not 0 <= segment.param < len(plan.params)
    ]
    return missing or [*_coverage_problems(plan), *_range_problems(plan), *_bucket_problems(plan)]


def _coverage_problems(plan: Plan) -> Iterator[str]:
    """Yield elements that are in no bucket, or in two."""
    by_param: list[list[Segment]] = [[] for _ in plan.params]
    for bucket in chain(plan.buckets, plan.parked):
        for segment in bucket.segments:
            by_param[segment.param].append(segment)
    for spec, segments in zip(plan.params, by_param, strict=True):
        if not segments:
            yield f"{spec.name}: no rank holds it"
            continue
        segments.sort(key=lambda segment: (segment.start, segment.stop))
        if any(segment.start > segment.stop for segment in segments):
            yield f"{spec.name}: a segment ends before it starts"
        ends = [0, *accumulate((segment.stop for segment in segments), max)]
        for segment, covered in zip(segments, ends, strict=False):
            if segment.start > covered:
                yield f"{spec.name}: no rank holds elements {covered} to {segment.start}"
            elif segment.start < covered:
                yield f"{spec.name}: elements {segment.start} to {min(covered, segment.stop)} are held twice"
        if ends[-1] != spec.numel:
            yield f"{spec.name}: segments end at {ends[-1]}, the parameter at {spec.numel}"


def _range_problems(plan: Plan) -> Iterator[str]:
    """Yield segments that overlap or are outside of the bucket, and buckets without exactly one range for each rank."""
    for number, bucket in enumerate(chain(plan.buckets, plan.parked)):
        if bucket.ranges.count != plan.world_size:
            yield f"bucket {number}: {bucket.ranges.count} ranges for {plan.world_size} ranks"
            continue
        if any(one.end > other.offset for one, other in pairwise(bucket.segments)):
            yield f"bucket {number}: segments overlap, or are not sorted by offset"
        if any(segment.offset < 0 or segment.end > bucket.numel for segment in bucket.segments):
            yield f"bucket {number}: a segment is outside of the bucket's {bucket.numel} elements"
        if isinstance(bucket.ranges, WholeRanges):
            yield from _holder_problems(number, bucket, bucket.ranges)


def _holder_problems(number: int, bucket: Bucket, ranges: WholeRanges) -> Iterator[str]:
    if len(ranges.holders) != len(bucket.segments):
        yield f"bucket {number}: {len(ranges.holders)} holders for {len(bucket.segments)} segments"
        return
    for segment, holder in zip(bucket.segments, ranges.holders, strict=True):
        if not 0 <= holder < ranges.count:
            yield f"bucket {number}: {segment} is held by rank {holder}, which does not exist"
            continue
        low, high = ranges.bounds(holder)
        if segment.offset < low or segment.end > high:
            yield f"bucket {number}: {segment} is outside of the range of rank {holder}, which holds it"


def _bucket_problems(plan: Plan) -> Iterator[str]:
    """Yield parameters that do not fit the other parameters of their bucket."""
    for number, bucket in enumerate(plan.buckets):
        for segment in bucket.segments:
            spec = plan.params[segment.param]
            if (spec.dtype, spec.device, spec.wire) != (bucket.dtype, bucket.device, bucket.wire):
                yield f"{spec.name}: {spec.dtype} {spec.wire} on {spec.device} cannot be sent in bucket {number}"
            if not spec.trainable:
                yield f"{spec.name}: frozen, but sent in bucket {number}"
    for bucket in plan.parked:
        for segment in bucket.segments:
            if plan.params[segment.param].trainable:
                yield f"{plan.params[segment.param].name}: trainable, but not sent"
