"""A function and classes outside of the packages that residuum knows, for pickles that name them."""

from __future__ import annotations

from pathlib import Path


def touch(path: str) -> str:
    """Leave a mark, so that a test notices that it was called."""
    Path(path).touch()
    return path


class Config:
    """An ordinary class of a user's project."""

    def __init__(self, path: str = "") -> None:
        self.path = path


class Touching:
    """A class whose constructor leaves a mark."""

    def __init__(self, path: str) -> None:
        touch(path)


class Toucher:
    """An object that can be called, and that a class does not bind as a method."""

    def __call__(self, path: str) -> str:
        return touch(path)


toucher = Toucher()


class Items(list):
    """A list of a user's project."""
