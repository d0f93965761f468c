"""Rows of the field's table: kinds of networks, attacks with their settings, and attacker knowledge.

The rows were fixed before seeds were drawn (``field-seeds.json`` names the commit). Settings of residuum
were chosen by other experiments on other images. Published settings are as released, with steps and
candidates, apart from the number format (tf32 on a GPU).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

from experiments.attack_options import attack_with
from residuum.attacks import Attack, every_attack, make_attack
from residuum.records.rundir import digest
from residuum.surfaces.surface import CHANGE, MOMENT
from residuum.training import TrainingConfig

MARGIN = TrainingConfig(steps=5000, dtype="float32")
BATCHES = TrainingConfig(method="sgd", batch=50, steps=4000, dtype="float32")
DECAY = TrainingConfig(method="gd", steps=10_000, weight_decay=1e-3, dtype="float32")
# As Loo et al. train, with larger steps: squared loss, few of them to where nothing is left.
LAZY = TrainingConfig(
    method="gd",
    loss="squared",
    lr=5e-4,
    momentum=0.9,
    steps=40_000,
    init="lecun",
    stop_loss=1e-9,
    dtype="float32",
)
STEPS, RESTARTS = 6000, 4  # of the stationarity attack
CHOSEN = 0.5  # confidence from which a reconstruction is the attack's own choice
TRUE = 0.8  # similarity from which that choice was right
MOST = 8  # candidates at most, in multiples of n


@dataclass(frozen=True)
class Arm:
    """An attack of the table.

    Attributes:
        attack: Name of the attack.
        title: Name in the table.
        whose: "published", "residuum", "baseline" or "plugin".
        grants: "start" (initial weights) or "moment" (optimizer state), if the attacker knows one of them
            besides the shape and the number of the samples.
    """

    title: str
    whose: str
    grants: str = ""
    attack: str = "auto"


ARMS = {
    "haim2022": Arm("Haim et al. 2022", "published"),
    "buzaglo2023": Arm("Buzaglo et al. 2023", "published"),
    "loo2024": Arm("Loo et al. 2024", "published", "start"),
    "geiping2020": Arm("Geiping et al. 2020", "published", "start", "geiping2020"),
    "geiping2020-moment": Arm("Geiping et al. 2020", "published", "moment", "geiping2020-moment"),
    "stationarity": Arm("stationarity", "residuum"),
    "moment": Arm("stationarity of the moment", "residuum", "moment", "moment"),
    "ntk": Arm("ntk", "residuum", "start"),
    "unmix": Arm("unmix", "residuum", "", "unmix"),
    "unmix-start": Arm("unmix", "residuum", "start", "unmix"),
    "unmix-moment": Arm("unmix", "residuum", "moment", "unmix-moment"),
    "invert": Arm("invert", "residuum", "start", "invert"),
    "invert-moment": Arm("invert", "residuum", "moment", "invert-moment"),
    "trunk-moment": Arm("trunk", "residuum", "moment", "trunk-moment"),
    "corners": Arm("corners", "residuum", "", "corners"),
    "together": Arm("all of residuum's together", "residuum"),
    "first-layer-weights": Arm("rows of the first layer", "baseline", "", "first-layer-weights"),
    "model-inversion": Arm("model inversion", "baseline", "", "model-inversion"),
    "other images": Arm("samples of others, as guesses", "baseline"),
}
POOLED = ("together", "other images")  # no attacks of their own
HAIM = {"cifar10": "cifar-b9dfyspx", "photos": "cifar-b9dfyspx"}  # others: of MNIST
MATCHED = ("invert", "invert-moment", "geiping2020", "geiping2020-moment")
MATCHING = {"restarts": 1, "steps": 3000, "seconds": 20.0, "lr_x": 0.05, "layers": "all"}
BASELINES = ("first-layer-weights", "model-inversion", "other images")
BINARY = ("stationarity", "unmix", "together", "haim2022", *BASELINES)


@dataclass(frozen=True)
class Row:
    """One kind of network and the attacks on it.

    Attributes:
        kind: "mlp", "sklearn", "convnet" or "table".
        boxed: Whether every attacker knows the range and the mean of the inputs.
        sizes: Sizes of the stationarity attack, if they are not 4 restarts of 2n candidates.
    """

    title: str
    data: str
    n: int
    arms: tuple[str, ...] = BINARY
    hidden: str = "1000-1000"
    task: str = "binary"
    training: TrainingConfig = MARGIN
    kind: str = "mlp"
    boxed: bool = False
    victims: int = 3
    sizes: dict[str, Any] = field(default_factory=dict)

    @property
    def tiny(self) -> Row:
        """Return a row that runs all code in seconds and measures nothing."""
        short = {"steps": 40, "batch": min(self.training.batch, 10)}
        return replace(
            self,
            n=10,
            hidden="-".join("30" for _ in self.hidden.split("-")),
            training=self.training.changed(**short),
            victims=1,
        )


INVERTED = ("invert-moment", "geiping2020-moment")
MOMENTS = ("moment", "unmix-moment", "together", "buzaglo2023", *BASELINES)
ROWS = {
    "cifar-500": Row("CIFAR n=500", "cifar10", 500, sizes={"candidates": 1000}),
    "cifar-1000": Row(
        "CIFAR n=1000", "cifar10", 1000, victims=2, sizes={"candidates": 2000, "restarts": 2}
    ),
    "mnist-500": Row("MNIST n=500", "mnist", 500, sizes={"candidates": 1000, "restarts": 2}),
    "cifar-100": Row("CIFAR n=100", "cifar10", 100),
    "cifar-50": Row("CIFAR n=50", "cifar10", 50),
    "cifar-200": Row("CIFAR n=200", "cifar10", 200),
    "cifar-100-ten": Row(
        "CIFAR n=100, ten classes",
        "cifar10",
        100,
        ("stationarity", "unmix", "together", "buzaglo2023", *BASELINES),
        task="multiclass",
    ),
    "cifar-100-momentum": Row(
        "CIFAR n=100, batches of 50, momentum state in the file",
        "cifar10",
        100,
        ("moment", "unmix-moment", *INVERTED, "together", "haim2022", *BASELINES),
        training=BATCHES.changed(momentum=0.9),
    ),
    "cifar-100-default": Row(
        "CIFAR n=100, default start, known",
        "cifar10",
        100,
        ("stationarity", "unmix-start", "together", "haim2022", *BASELINES),
        training=MARGIN.changed(init="default"),
    ),
    "cifar-100-lazy": Row(
        "CIFAR n=100, squared loss near a known start",
        "cifar10",
        100,
        ("ntk", "unmix-start", "invert", "together", "loo2024", "geiping2020", *BASELINES),
        task="regression",
        training=LAZY,
        boxed=True,
    ),
    "sklearn-100": Row(
        "scikit-learn's MLPClassifier, CIFAR n=100, ten classes, as pickled",
        "cifar10",
        100,
        MOMENTS,
        hidden="200",
        task="multiclass",
        kind="sklearn",
    ),
    "cifar-100-depth2": Row("CIFAR n=100, 2 layers", "cifar10", 100, hidden="1000"),
    "cifar-100-depth4": Row("CIFAR n=100, 4 layers", "cifar10", 100, hidden="1000-500-100"),
    "cifar-100-depth5": Row("CIFAR n=100, 5 layers", "cifar10", 100, hidden="1000-500-100-50"),
    "cifar-100-batches": Row("CIFAR n=100, batches of 50", "cifar10", 100, training=BATCHES),
    "cifar-100-decay": Row("CIFAR n=100, weight decay 1e-3", "cifar10", 100, training=DECAY),
    "table-80": Row(
        "table of 5 uniform columns, n=80",
        "uniform",
        80,
        ("corners", "stationarity", "together", "haim2022", *BASELINES),
        hidden="400-400",
        kind="table",
        boxed=True,
    ),
    "convnet-20": Row(
        "convnet, CIFAR n=20, ten classes, momentum state in the file",
        "cifar10",
        20,
        ("trunk-moment", *INVERTED, "together", "other images"),
        task="multiclass",
        kind="convnet",
    ),
    "digits-20": Row("digits of 8 x 8, n=20", "digits", 20, hidden="100-100"),
    "photos-20": Row("photographs, n=20, 2 layers", "photos", 20, hidden="200"),
}
WITHOUT_DATA = ("digits-20", "photos-20", "table-80")


def arm_of(name: str) -> Arm:
    """Return an attack of the table, or of a plug-in with the knowledge that its attack surface needs."""
    if name in ARMS:
        return ARMS[name]
    brought = every_attack().get(name)
    needs = {CHANGE: "start", MOMENT: "moment"}
    return Arm(name, "plugin", needs.get(brought.surface, "") if brought else "", name)


def settings(row: Row, arm: str) -> Attack:
    """Return the settings of an attack on a kind of network, without seed and device."""
    presets = {
        "haim2022": f"haim2022-{HAIM.get(row.data, 'mnist-rbijxft7')}",
        "buzaglo2023": "buzaglo2023-multiclass",
        "loo2024": "loo2024",
    }
    if arm in presets:
        return make_attack(preset=presets[arm], dtype="auto")
    if arm == "ntk":
        return make_attack(preset="ntk", candidates=2 * row.n, dtype="auto")
    if arm in BASELINES:
        return attack_with(arm_of(arm).attack, candidates=2 * row.n)
    sizes = {"candidates": 2 * row.n, "restarts": RESTARTS, "steps": STEPS, **row.sizes}
    if arm in MATCHED or arm == "trunk-moment":
        sizes = {**MATCHING, "candidates": row.n}
    return attack_with(arm_of(arm).attack, **sizes)


def pooled(row: Row) -> list[str]:
    """Return the attacks of residuum whose candidates count together."""
    return [arm for arm in row.arms if arm_of(arm).whose == "residuum" and arm not in POOLED]


def identity(row: Row) -> str:
    """Return a hash of all settings of a kind of network."""
    of_attacks = ("title", "arms", "sizes")
    values = {**asdict(row), "training": row.training.model_dump()}
    values["made"] = values.pop("kind")  # stored digests have the field under this name
    return digest({key: value for key, value in values.items() if key not in of_attacks})


def frozen(row: Row, arm: str) -> str:
    """Return a hash of all settings of an attack: networks, attacker knowledge, settings and counting."""
    arms = pooled(row) if arm == "together" else [arm]
    # An attack of another package may be missing where results are read. Its version stands for its settings.
    attacks = [
        (asdict(arm_of(name)), settings(row, name).to_json() if name in ARMS else {})
        for name in arms
    ]
    return digest(identity(row), arm, attacks, [CHOSEN, TRUE, MOST])
