"""Is a reconstruction unique? The certificate, its parts, and what it will cost."""

from residuum.theory.uniqueness.certificate import SHARE, Cost, estimate, uniqueness

__all__ = ["SHARE", "Cost", "estimate", "uniqueness"]
