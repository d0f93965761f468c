"""Attack surfaces: tensors of a model that equal a weighted sum of gradients at the training samples."""
