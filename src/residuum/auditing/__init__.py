"""The audit: from a model, its samples and the attacker's knowledge to a verdict and its artifacts.

Start reading at :mod:`residuum.auditing.run`. This package imports nothing by itself, so that the command
line can read the settings of an audit without loading torch.
"""
