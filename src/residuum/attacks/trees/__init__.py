"""Attacks on the structure of decision trees."""
