"""Attacks that separate mixtures of samples in the rows of a dense layer."""
