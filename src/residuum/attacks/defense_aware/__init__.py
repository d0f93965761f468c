"""Attacks that know which defense was used."""
