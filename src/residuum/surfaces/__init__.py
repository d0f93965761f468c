"""Attack surfaces of a release."""
