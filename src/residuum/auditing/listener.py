"""The interface by which a running audit reports its progress, for example to the command line."""

from __future__ import annotations

from residuum.attacks.base import Watcher


class AuditListener:
    """Receives the messages and the progress of an audit. This base class ignores them."""

    def message(self, text: str) -> None:
        """Receive a line of text about the audit, such as the accuracy of the network or the planned work."""

    def stage(self, name: str) -> None:
        """Receive the name of a stage (step) of the audit when the stage begins."""

    def watch_attack(self, attack: str, restarts_done: int, restarts: int) -> Watcher | None:
        """Return a function that receives the progress of an attack during its next batch of restarts.

        A restart is a run of the attack from other random candidates.

        Args:
            attack: Name of the attack.
            restarts_done: Number of restarts of the attack that have finished.
            restarts: Number of all planned restarts of the attack.

        Returns:
            The function that receives the progress, or None to receive nothing.
        """
        return None


SILENT = AuditListener()
