"""torch's ZeroRedundancyOptimizer by name and behaviour."""
