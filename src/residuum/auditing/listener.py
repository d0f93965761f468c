"""What an audit reports while it runs. The command line prints it; other callers can subclass it."""

from __future__ import annotations

from residuum.attacks.base import Watcher


class AuditListener:
    """Receives messages, stage names and attack progress. This base class ignores them all."""

    def message(self, text: str) -> None:
        """Receive a line of text, such as the accuracy of the network or the expected time."""

    def stage(self, name: str) -> None:
        """Receive the name of a stage as it begins."""

    def watch_attack(self, attack: str, restarts_done: int, restarts: int) -> Watcher | None:
        """Return a function that receives the progress of the next batch of restarts.

        Args:
            attack: Name of the attack.
            restarts_done: Restarts that are finished.
            restarts: Restarts in all, as far as it can be estimated.

        Returns:
            The function, or None to receive nothing.
        """
        return None


SILENT = AuditListener()
