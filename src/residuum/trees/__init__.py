"""Recover the training table of a random forest from the structure of its trees."""
