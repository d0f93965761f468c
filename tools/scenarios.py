"""Small attacks that must return the same under two versions of residuum. ``compare_versions.py`` runs them.

This file runs under the code of both versions, so it uses only names in ``rs`` and the command line, which
every version has. If versions differ, the file checks the version: older code has one flat ``AttackConfig``
for all attacks, newer code has one class per attack. Networks come from seeds. The results go into one
file.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import runpy
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import residuum as rs

Network: Any = getattr(rs, "Network", None) or rs.Checkpoint  # the name that older code has
OLD = hasattr(rs, "AttackConfig")  # one flat configuration for all attacks

Numbers = dict[str, Tensor]
Words = dict[str, Any]
Scenario = Callable[[Path, int], tuple[Numbers, Words]]  # a folder to work in, the most steps

# Architecture, and the shape of a sample.
NETWORKS = {
    "mlp": ("mlp:12-16-10-{}", (12,)),
    "convnet": ("convnet:1x6x6-4-5-{}", (1, 6, 6)),
    "polynomial": ("polynomial:12-16-{},coefficients=0/0.5/0/1", (12,)),
}
# Outputs, settings, and what is granted.
OBJECTIVES: dict[str, tuple[int, Words, Words]] = {
    "binary": (1, {"name": "binary-kkt"}, {}),
    "tied rivals": (3, {"name": "multiclass-kkt"}, {}),
    "best rival": (3, {"name": "multiclass-kkt", "rivals": "best"}, {}),
    "free decay": (1, {"name": "weight-decay"}, {}),
    "free decay, three outputs": (3, {"name": "weight-decay"}, {}),
    **{
        f"{loss} decay": (
            1,
            {"name": "weight-decay"},
            {"loss": loss, "weight_decay": 0.01, "sample_count": 9},
        )
        for loss in ("logistic", "squared")
    },
    **{
        f"ntk at {place}": (1, {"name": "ntk", "gradients": place}, {})
        for place in ("theta", "theta0", "both")
    },
}
COMMON: Words = {"candidates": 6, "restarts": 2, "steps": 60, "dtype": "float64", "sigma": 0.3}
GROWING: Words = {
    "name": "binary-kkt",
    "steps": 120,
    "layers": "all",
    "surrogate": "softplus",
    "sharpness": 6.0,
    "anneal": "none",
    "split_trigger": "period",
    "split_every": 30,
    "split_threshold": 0.0,
    "split_cap": 0.3,
}
# One setting after another that takes a way of its own through the code.
SETTINGS: dict[str, Words] = {
    "all layers": {"layers": "all"},
    "not normalized": {"layers": "all", "normalize": False},
    "softplus": {"surrogate": "softplus"},
    "true gates": {"surrogate": "none"},
    "momentum": {"optimizer": "sgd", "lr_x": 0.03, "lr_lam": 0.03, "layers": "all"},
    "multipliers in closed form": {"lam_every": 20},
    "single precision": {"dtype": "float32"},
    "penalties": {
        "constraint": "penalty",
        "lam_min": 0.3,
        "priors": (("value-box", 2.0), ("multiplier-floor", 5.0)),
    },
    "mean multipliers": {"lam_scale": "mean", "lam_distribution": "normal"},
    "another seed": {"seed": 7},
}

# Attacks that match gradients or outputs, on any network.
GRADIENT_ATTACKS = (
    *("moment", "invert", "invert-moment", "geiping2020", "geiping2020-moment"),
    "model-inversion",
)
# Presets that one version has among its presets of growth, or as attacks.
PRESETS_OF_ONE_VERSION = ("shen2026", "model-inversion", "first-layer-weights")


def weights(arch: str, seed: int = 0) -> Numbers:
    """Return random weights by name and shape, whatever the order in which a version builds its layers."""
    theta = rs.Architecture.parse(arch).build().state_dict()
    rng = torch.Generator().manual_seed(seed)
    return {
        name: 0.4 * torch.randn(theta[name].shape, generator=rng, dtype=torch.float64)
        for name in sorted(theta)
    }


def case(network: str, outputs: int = 1, **granted: Any) -> tuple[Any, rs.Knowledge]:
    """Return a network and the knowledge of shape, range, mean and initial weights."""
    arch, shape = NETWORKS[network]
    arch = arch.format(outputs)
    knowledge = rs.Knowledge(
        shape=shape,
        value_range=(-0.6, 0.7),
        mean=torch.full(shape, 0.1, dtype=torch.float64),
        theta0=weights(arch, 1),
        **granted,
    )
    return Network(weights(arch), arch), knowledge


def make_config(name: str = "auto", *, preset: str = "residuum", **settings: Any) -> Any:
    """Return an attack, or the configuration of one in older code.

    Args:
        name: Name of the attack. "auto" stands for the attack of the preset.
        preset: Name of the preset.
        **settings: Settings that differ from the preset. Older code had all settings for every attack, so
            settings that the attack does not have are left out.

    Returns:
        The third argument of ``rs.attack``.
    """
    if not OLD:
        if preset not in rs.PRESETS:  # older code had presets that only named an attack
            name, preset = preset, "residuum"
        kind = rs.attacks.attack_class(rs.PRESETS[preset].attack if name == "auto" else name)
        return rs.attacks.make_attack(name, preset, **kind.select_settings(settings))
    if preset in rs.PRESETS:
        config = rs.PRESETS[preset]
    else:
        config = rs.PRESETS["residuum"].changed(**rs.attacks.GROWTH_PRESETS["paper"])
    return config.changed(**settings, **({} if name == "auto" else {"objective": name}))


def changed(attack: Any, most: int = 10**9, **settings: Any) -> Any:
    """Return an attack with other settings and at most ``most`` steps, if it takes steps."""
    if OLD or "steps" in type(attack).model_fields:
        settings["steps"] = min(settings.get("steps", attack.steps), most)
    return attack.changed(**settings)


def outputs_of(reconstruction: rs.Reconstruction) -> tuple[Numbers, Words]:
    """Return everything of a reconstruction but its seconds."""
    names = ("x", "labels", "lam", "run", "steps", "loss", "layers")
    numbers = {name: getattr(reconstruction, name) for name in names}
    if reconstruction.selection is not None:
        selection_names = ("x", "lam", "support", "members", "confidence", "index")
        numbers |= {
            f"selection.{name}": getattr(reconstruction.selection, name) for name in selection_names
        }
    keys = ("kind", "step", "run", "restart", "parent", "children", "ident")
    events = [{key: event[key] for key in keys if key in event} for event in reconstruction.events]
    words = {
        "attack": reconstruction.attack,
        "status": reconstruction.status,
        "layers": reconstruction.layer_names,
    }
    return numbers, {**words, "events": events}


def run_attack(
    _: Path,
    most: int,
    *,
    network: str = "mlp",
    outputs: int = 1,
    granted: Words | None = None,
    settings: Words,
) -> tuple[Numbers, Words]:
    """Run one attack with these settings."""
    checkpoint, knowledge = case(network, outputs, **(granted or {}))
    config = changed(make_config(**{**COMMON, **settings}), most)
    return outputs_of(rs.attack(checkpoint, knowledge, config))


def control_arm(
    _: Path, most: int, *, network: str, arm: str, settings: Words
) -> tuple[Numbers, Words]:
    """Run growth by a control arm of Shen et al. 2026, a setting of older code and now part of the papers."""
    root = Path(rs.__file__).parents[2]
    if not (root / "papers" / "shen2026_controls.py").exists():
        return run_attack(_, most, network=network, settings={**settings, "split": arm})
    if str(root) not in sys.path:
        sys.path.append(str(root))
    from papers.shen2026_controls import CONTROLS, attack

    checkpoint, knowledge = case(network)
    config = changed(make_config(**{**COMMON, **settings}), most)
    return outputs_of(attack(checkpoint, knowledge, config, CONTROLS[arm]))


def preset(_: Path, most: int, *, name: str) -> tuple[Numbers, Words]:
    """Run a few steps of published settings."""
    few = {"steps": min(50, most), "candidates": 6, "restarts": 2, "device": "cpu"}
    config = make_config(preset=name, **few)
    is_multiclass = (config.objective if OLD else config.name) == "multiclass-kkt"
    checkpoint, knowledge = case("mlp", 3 if is_multiclass else 1)
    return outputs_of(rs.attack(checkpoint, knowledge, config))


def settings_of_each_restart(_: Path, most: int) -> tuple[Numbers, Words]:
    """Run restarts side by side that differ in rates, initialization and sharpness."""
    checkpoint, knowledge = case("mlp")
    config = make_config(**{**COMMON, "name": "binary-kkt", "steps": min(60, most)})
    runs = [config.changed(lr_x=0.003, sharpness=40.0), config.changed(sigma=0.6, lr_lam=0.03)]
    return outputs_of(rs.attack(checkpoint, knowledge, config, per_run=runs))


def a_live_module(_: Path, most: int) -> tuple[Numbers, Words]:
    """Attack a module that is not a checkpoint."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 9), nn.ReLU(), nn.Linear(9, 1)).double()
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.4 * torch.randn(p.shape, generator=rng, dtype=p.dtype))
    config = make_config(**{**COMMON, "steps": min(60, most), "layers": "first"})
    return outputs_of(rs.attack(model, rs.Knowledge(shape=(1, 6, 6)), config))


def mixture(shape: tuple[int, ...], neurons: int, seed: int) -> Tensor:
    """Return (neurons, values) rows that mix six sparse samples with positive weights, as training does."""
    rng = torch.Generator().manual_seed(seed)
    values = math.prod(shape)
    samples = torch.randn(6, values, generator=rng, dtype=torch.float64)
    samples *= torch.rand(6, values, generator=rng, dtype=torch.float64) > 0.7
    weights = torch.relu(torch.randn(neurons, 6, generator=rng, dtype=torch.float64))
    return weights @ samples + 1e-6 * torch.randn(
        neurons, values, generator=rng, dtype=torch.float64
    )


def mixed_layer(_: Path, most: int, *, attack: str) -> tuple[Numbers, Words]:
    """Attack a first layer whose rows are mixtures of samples, by weights and optimizer state."""
    shape, arch = (1, 8, 8), "mlp:64-40-1"
    theta, moment = weights(arch), weights(arch, 2)
    theta["layers.0.weight"], moment["layers.0.weight"] = (mixture(shape, 40, s) for s in (3, 4))
    knowledge = rs.Knowledge(
        shape=shape, value_range=(-2.0, 2.0), moment=moment if attack.endswith("moment") else None
    )
    config = make_config(**{**COMMON, "name": attack, "steps": min(40, most), "seconds": 10.0})
    return outputs_of(rs.attack(Network(theta, arch), knowledge, config))


def behind_convolutions(_: Path, most: int, *, attack: str) -> tuple[Numbers, Words]:
    """Attack the first dense layer behind a convolution."""
    dense = nn.Linear(4 * 36, 40)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), dense, nn.ReLU(), nn.Linear(40, 1)
    ).double()
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.4 * torch.randn(p.shape, generator=rng, dtype=p.dtype))
        dense.weight.copy_(mixture((4, 6, 6), 40, 3).abs())
    moment = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    granted = {"moment": moment} if attack.endswith("moment") else {}
    config = make_config(**{**COMMON, "name": attack, "steps": min(40, most)})
    return outputs_of(rs.attack(model, rs.Knowledge(shape=(1, 6, 6), **granted), config))


def few_columns(_: Path, most: int) -> tuple[Numbers, Words]:
    """Run corners on four samples, each on the activation boundaries of seven neurons."""
    arch = "mlp:4-28-1"
    theta, rng = weights(arch), torch.Generator().manual_seed(6)
    samples = torch.rand(4, 4, generator=rng, dtype=torch.float64) - 0.5
    theta["layers.0.bias"] = -(theta["layers.0.weight"] * samples.repeat(7, 1)).sum(1)
    config = make_config(**{**COMMON, "name": "corners", "steps": min(40, most), "seconds": 1e9})
    knowledge = rs.Knowledge(shape=(4,), value_range=(-1.0, 1.0))
    return outputs_of(rs.attack(Network(theta, arch), knowledge, config))


def photographs(_: Path, most: int) -> tuple[Numbers, Words]:
    """Run the settings that an attack chooses for a first layer that looks like photographs."""
    arch, shape = "mlp:768-30-1", (3, 16, 16)
    rng = torch.Generator().manual_seed(5)
    smooth = torch.randn(6, *shape, generator=rng, dtype=torch.float64).cumsum(2).cumsum(3)
    smooth = (smooth - smooth.mean((2, 3), keepdim=True)).flatten(1)
    theta = weights(arch)
    gates = torch.relu(torch.randn(30, 6, generator=rng, dtype=torch.float64))
    theta["layers.0.weight"] = 0.01 * gates @ smooth
    knowledge = rs.Knowledge(
        shape=shape, value_range=(0.0, 1.0), mean=torch.full(shape, 0.5).double()
    )
    config = make_config(steps=min(40, most), restarts=2, candidates=6)
    reconstruction = rs.attack(Network(theta, arch), knowledge, config)
    numbers, words = outputs_of(reconstruction)
    chosen = ("name", "priors", "lr_lam", "sigma", "lam_min")
    flat = flatten_settings(reconstruction.settings)
    flat["name"] = flat["objective" if OLD else "attack"]
    return numbers, {**words, "chosen": {name: str(flat.get(name)) for name in chosen}}


def flatten_settings(settings: Words) -> Words:
    """Return settings by their own names, whatever groups a version keeps them in."""
    flat: Words = {}
    for name, value in settings.items():
        flat |= flatten_settings(value) if isinstance(value, dict) else {name: value}
    return flat


def from_file(folder: Path, most: int, *, suffix: str) -> tuple[Numbers, Words]:
    """Run the same small attack on a file of one of three formats."""
    arch, file = "mlp:12-16-10-1", folder / f"model{suffix}"
    theta = weights(arch)
    if suffix == ".pt":
        torch.save(theta, file)
    elif suffix == ".safetensors":
        rs.save_checkpoint(Network(theta, arch), file)
    else:
        import joblib
        import numpy as np
        from sklearn.neural_network import MLPClassifier

        rng = np.random.default_rng(0)
        x, y = rng.standard_normal((30, 12)), np.arange(30) % 2
        joblib.dump(MLPClassifier((16, 10), max_iter=5, random_state=0).fit(x, y), file)
    config = make_config(**{**COMMON, "name": "binary-kkt", "steps": min(60, most)})
    return outputs_of(rs.attack(file, rs.Knowledge(shape=(12,)), config))


def run_audit(_: Path, most: int) -> tuple[Numbers, Words]:
    """Run an audit with samples and return every candidate, match and p-value."""
    split = rs.load_dataset("digits", 20, seed=3, holdout=300)
    state = rs.train("mlp:64-40-1", split.train, rs.TrainingConfig(steps=400, seed=3))
    checkpoint = Network(state.theta, "mlp:64-40-1", split.train.shape, task="binary")
    result = rs.audit(
        checkpoint,
        data=split.train,
        holdout=split.holdout,
        effort="quick",
        steps=min(60, most),
        baselines=False,
        seed=3,
    )
    numbers: Numbers = {}
    for reconstruction in result.reconstructions:
        numbers |= {
            f"{reconstruction.attack}.{key}": value
            for key, value in outputs_of(reconstruction)[0].items()
        }
    verdict = result.verdict
    words = {"outcome": verdict.outcome, "grade": str(verdict.grade), "p": str(verdict.p_value)}
    return numbers, {
        **words,
        "attacks": [reconstruction.attack for reconstruction in result.reconstructions],
    }


def resume_attack(
    folder: Path, most: int, *, network: str, settings: Words
) -> tuple[Numbers, Words]:
    """Stop an attack at every evaluation step and resume it from its file until it is done."""
    checkpoint, knowledge = case(network)
    config = changed(make_config(**{**COMMON, **settings}), most, seconds=1e-9)
    stops = 0
    while True:
        reconstruction = rs.attack(checkpoint, knowledge, config, state_path=folder / "state")
        if "time" not in reconstruction.status:
            numbers, words = outputs_of(reconstruction)
            return numbers, {**words, "stops": stops}
        stops += 1


def run_identify(folder: Path, _: int, *, theta: Numbers, degree: int) -> tuple[Numbers, Words]:
    """Run `residuum identify` on sum_j a_j (W_j . x)^degree."""
    width, inputs = theta["weight"].shape
    power = "/".join(["0"] * degree + ["1"])
    arch = f"polynomial:{inputs}-{width}-1,coefficients={power}"
    rs.save_checkpoint(Network(theta, arch), folder / "model.safetensors")
    run("identify", str(folder / "model.safetensors"), "--out", str(folder / "out"), "--quiet")
    words = json.loads((folder / "out" / "identify.json").read_text())
    word_names = ("method", "r", "rank_k", "n_r", "scale", "certified")
    numbers = load_file(folder / "out" / "identification.safetensors")
    return numbers, {key: words[key] for key in word_names if key in words}


def exact_cubic(samples: int = 4, inputs: int = 8) -> Numbers:
    """Return an exact point of sum_j a_j (W_j . x)^3 on orthonormal samples x_i, multipliers 1 / k_i.

    The neurons are s w with w = sum_{i in I} y_i k_i x_i over one or two samples I, s = (3 |w|^2)^(-1/4) and
    a = 1 / (3 s). Then W_j = 3 a_j f(W_j) and a_j = sum_i b_i (W_j . x_i)^3.
    """
    rng = torch.Generator().manual_seed(0)
    x = torch.linalg.qr(torch.randn(inputs, inputs, generator=rng, dtype=torch.float64))[0]
    y, k = (-1.0) ** torch.arange(samples), 1 + 0.2 * torch.arange(samples, dtype=torch.float64)
    sets = [c for size in (1, 2) for c in itertools.combinations(range(samples), size)]
    w = torch.stack([sum(y[i] * k[i] * x[i] for i in members) for members in sets])
    s = (3 * w.square().sum(1)) ** -0.25
    return {"weight": s[:, None] * w, "coefficient": 1 / (3 * s)}


def run(*arguments: str) -> None:
    """Run the command line in this process."""
    before, sys.argv = sys.argv, ["residuum", *arguments]
    try:
        runpy.run_module("residuum", run_name="__main__")
    except SystemExit as leave:
        if leave.code:
            raise RuntimeError(f"residuum {arguments[0]}: exit code {leave.code}") from None
    finally:
        sys.argv = before


def scenarios() -> Iterator[tuple[str, Scenario]]:
    """Yield every scenario by name."""
    for network, (name, (outputs, settings, granted)) in itertools.product(
        NETWORKS, OBJECTIVES.items()
    ):
        if network == "polynomial" and outputs > 1:
            continue
        arguments = {"outputs": outputs, "granted": granted, "settings": settings}
        yield f"{network}: {name}", partial(run_attack, network=network, **arguments)
    for network in NETWORKS:
        settings = {**GROWING, "split": "curvature", "steps": 60 if network == "convnet" else 120}
        yield (
            f"{network}: grown by curvature",
            partial(run_attack, network=network, settings=settings),
        )
        for arm in ("random", "frank-wolfe"):
            run_arm = partial(control_arm, network=network, arm=arm, settings=settings)
            yield f"{network}: grown by {arm}", run_arm
    for name, change in {
        "without merging": {"split_merge": False},
        "and merged, from candidates that are nearly one": {"sigma": 1e-5},
        "where the loss stagnates": {"split_trigger": "stagnation", "split_tolerance": 0.5},
        "at small gradients": {"split_trigger": "gradient", "split_tolerance": 0.5},
    }.items():
        settings = {**GROWING, "split": "curvature", **change}
        yield f"mlp: grown {name}", partial(run_attack, settings=settings)
    for name, change in SETTINGS.items():
        settings = {"name": "binary-kkt", **change}
        yield f"mlp: {name}", partial(run_attack, settings=settings)
    for name in {**dict.fromkeys(rs.PRESETS), **dict.fromkeys(PRESETS_OF_ONE_VERSION)}:
        yield f"preset {name}", partial(preset, name=name)
    for network, name in itertools.product(("mlp", "convnet"), GRADIENT_ATTACKS):
        granted = {"moment": weights(NETWORKS[network][0].format(1), 2)} if "moment" in name else {}
        yield (
            f"{network}: {name}",
            partial(run_attack, network=network, granted=granted, settings={"name": name}),
        )
    yield (
        "mlp: first-layer-weights",
        partial(run_attack, settings={"name": "first-layer-weights"}),
    )
    yield (
        "polynomial: polynomial",
        partial(run_attack, network="polynomial", settings={"name": "polynomial"}),
    )
    for name in ("unmix", "unmix-moment"):
        yield f"mixed layer: {name}", partial(mixed_layer, attack=name)
    for name in ("trunk", "trunk-moment"):
        yield f"behind convolutions: {name}", partial(behind_convolutions, attack=name)
    yield "few columns: corners", few_columns
    yield "defaults for photographs", photographs
    for suffix in (".pt", ".safetensors", ".joblib"):
        yield f"from a {suffix} file", partial(from_file, suffix=suffix)
    yield "a whole audit", run_audit
    yield "mlp: settings of each restart", settings_of_each_restart
    yield "a live module", a_live_module
    for network in NETWORKS:
        settings = {"name": "binary-kkt", "optimizer": "adam"}
        yield f"{network}: resumed", partial(resume_attack, network=network, settings=settings)
    settings = {**GROWING, "split": "curvature"}
    yield "mlp: grown and resumed", partial(resume_attack, network="mlp", settings=settings)
    rng = torch.Generator().manual_seed(0)
    random = {
        "weight": torch.randn(5, 4, generator=rng, dtype=torch.float64),
        "coefficient": torch.randn(5, generator=rng, dtype=torch.float64),
    }
    yield "identify: exact cubic", partial(run_identify, theta=exact_cubic(), degree=3)
    yield "identify: random quartic", partial(run_identify, theta=random, degree=4)
    yield "identify: moment of a quadratic", partial(run_identify, theta=random, degree=2)


def main() -> None:
    """Run the scenarios on the command line and save what each of them returned or how it failed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=10**9, help="most steps of each attack")
    parser.add_argument("--only", default="", help="run scenarios with this in their name")
    options = parser.parse_args()
    torch.set_num_threads(1)  # sums in one order
    results: dict[str, dict[str, Any]] = {}
    for name, scenario in scenarios():
        if options.only not in name:
            continue
        with tempfile.TemporaryDirectory() as folder:
            try:
                numbers, words = scenario(Path(folder), options.steps)
            except Exception as problem:  # noqa: BLE001  one that fails is a difference, not the end
                numbers, words = {}, {"failed": f"{type(problem).__name__}: {problem}"}
        numbers = {key: value.clone() for key, value in numbers.items()}
        results[name] = {"numbers": numbers, "words": json.dumps(words, sort_keys=True)}
    torch.save({"code": rs.__file__, "results": results}, options.out)


if __name__ == "__main__":
    main()
