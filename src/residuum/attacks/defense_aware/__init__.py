"""Attackers who know which defense was used."""
