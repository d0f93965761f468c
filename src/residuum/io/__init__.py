"""Read model files without executing them, and convert files and live models to networks."""
