"""Random forests: the structure of their trees, and the training table that this structure determines."""
