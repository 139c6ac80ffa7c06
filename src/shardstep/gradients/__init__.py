"""From autograd to this rank's part of the mean gradient."""
