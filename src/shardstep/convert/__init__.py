"""From one format to another: a source is described once, and its tensors are read when they are written."""
