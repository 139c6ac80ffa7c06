"""Convert checkpoints between formats: a reader describes the source, a writer reads its tensors one by one."""
