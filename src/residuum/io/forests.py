"""Read all forests in a model file: random forests, single trees and boosted trees, of any library."""

from __future__ import annotations

from dataclasses import dataclass

from residuum.io.boosted_files import find_boosted_forests
from residuum.io.forest_files import find_forests
from residuum.io.onnx_trees import find_onnx_forests
from residuum.io.release import Release
from residuum.trees.forest import Forest


@dataclass(frozen=True)
class NamedForest:
    """A forest of a model file.

    Attributes:
        name: Class of the model, such as "RandomForestRegressor".
        forest: The trees.
    """

    name: str
    forest: Forest


def read_forests(release: Release) -> tuple[NamedForest, ...]:
    """Return all forests of a model file, the largest first. Nothing in the file is executed.

    Args:
        release: The model file that was opened.

    Returns:
        The forests, or an empty tuple if the release holds no forest.
    """
    forests = [NamedForest(name, forest) for name, forest in find_forests(release.content)]
    forests += [NamedForest(name, forest) for name, forest in find_boosted_forests(release.content)]
    if release.graph is not None:
        producer = release.metadata.get("producer_name", "")
        forests += [NamedForest(*pair) for pair in find_onnx_forests(release.graph, producer)]
    forests.sort(key=lambda named: -sum(len(tree.left) for tree in named.forest.trees))
    return tuple(forests)
