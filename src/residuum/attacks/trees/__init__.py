"""Attacks that recover training data from decision trees."""
