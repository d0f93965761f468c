"""The audit: the one place where stages meet, from a checkpoint to a verdict and its artifacts."""

from residuum.auditing.result import AuditResult
from residuum.auditing.run import audit
from residuum.auditing.verdict import AttackOutcome, Verdict, decide

__all__ = ["AttackOutcome", "AuditResult", "Verdict", "audit", "decide"]
