"""Parameters as views of flat buffers, and how whatever uses one waits for weights in flight."""
