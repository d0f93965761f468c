"""The papers again, figure by figure: ``python -m papers haim2022:fig2``. Not part of the package.

A paper is a file with a dict ``FIGURES``. A figure is computed from a ``Context`` (sizes, data, device,
kept work) into an ``Outcome`` (rows, arrays, details; both in ``runs.py``) and drawn from that
alone (``drawing.py``). ``points.py`` holds exact KKT points in closed form, which the tests use too.
"""
