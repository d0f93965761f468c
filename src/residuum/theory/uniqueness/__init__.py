"""Is a reconstruction unique? The certificate, its parts, and what it will cost."""

from residuum.theory.uniqueness.certificate import SHARE, uniqueness
from residuum.theory.uniqueness.cost import Cost, estimate

__all__ = ["SHARE", "Cost", "estimate", "uniqueness"]
