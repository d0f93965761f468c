"""Attacks that separate the mixtures of samples in the rows of a dense layer."""
