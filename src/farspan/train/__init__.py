"""Training: configuration, optimizer, step, checkpoint, loop, metrics."""
