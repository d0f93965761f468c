"""Attacks that find samples whose gradients solve a stationarity equation, such as the KKT equation."""
