"""The audit, which tests whether the training data of a model leaks, and writes its verdict to files.

Start reading at :mod:`residuum.auditing.run`. This package imports nothing by itself, so that the command
line can read the settings of an audit without loading torch.
"""
