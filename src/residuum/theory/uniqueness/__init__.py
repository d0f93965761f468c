"""Is a reconstruction unique? The certificate, its parts, and what it will cost."""

from residuum.theory.uniqueness.certificate import uniqueness
from residuum.theory.uniqueness.cost import Cost, estimate
from residuum.theory.uniqueness.reconstruction import Question, question

__all__ = ["Cost", "Question", "estimate", "question", "uniqueness"]
