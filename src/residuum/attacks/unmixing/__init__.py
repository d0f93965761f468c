"""Attacks that recover samples from the rows of a weight matrix, which are mixtures of training samples."""
