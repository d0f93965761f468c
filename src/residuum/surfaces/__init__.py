"""Attack surfaces of a release: tensors that gradients at the training samples must explain."""
