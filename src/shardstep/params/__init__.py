"""Holds: parameters as views of flat buffers, and where gradients and arriving weights lie."""
