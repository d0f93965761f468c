"""Attack surfaces of a release: tensors that equal a weighted sum of gradients at the training samples."""
