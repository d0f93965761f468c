"""Attacks by an attacker who knows which defense protects the network."""
