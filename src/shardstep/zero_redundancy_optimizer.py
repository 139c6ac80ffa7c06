"""Where programs import the drop-in from, as they do from torch's module of this name. The code is in `drop_in/`."""

from shardstep.drop_in.buckets import _DDPBucketAssignment as _DDPBucketAssignment
from shardstep.drop_in.buckets import _OverlapInfo as _OverlapInfo
from shardstep.drop_in.buckets import _OverlapStatus as _OverlapStatus
from shardstep.drop_in.local_shard import _is_trainable as _is_trainable
from shardstep.drop_in.objects import _broadcast_object as _broadcast_object
from shardstep.drop_in.objects import _recursive_copy_to_device as _recursive_copy_to_device
from shardstep.drop_in.optimizer import ZeroRedundancyOptimizer as ZeroRedundancyOptimizer
from shardstep.drop_in.optimizer import _ZeROJoinHook as _ZeROJoinHook

__all__ = ["ZeroRedundancyOptimizer"]
