"""How many samples does every attack reconstruct from the same networks, counted by one rule?

    python -m experiments.field run runs/field                data that need no files
    python -m experiments.image_data SOURCE FOLDER            MNIST and CIFAR, images that no tuning used
    python -m experiments.field run FOLDER OUT --device cuda  every row
    python -m experiments.field page OUT PAGE                 docs/field.md with the results in OUT
    python -m experiments.field picture OUT PNG               the best candidates above their samples
    python -m experiments.field draw                          seeds, after the settings are committed

``field_rows.py`` lists rows, attacks and their settings. Attacks of installed packages (entry point
``residuum.plugins``) run on every row, too. ``--attacks NAME`` runs one attack. An interrupted run
continues with the same command, attack by attack.

Candidates and samples are matched one-to-one by NCC at full resolution, up to sign. Rows of tables are
matched by 1 - the largest error over the range of its column. A sample counts above 0.7, 0.8 and 0.9.
``ssim3`` is the published rule for color images: the nearest candidate at half resolution, with the mean
added, above 0.4. Every count is stored with the count of as many samples that the network never saw. Only
the first 8n candidates of an attack count. Seconds are those of an attack that shares the machine with the
other workers.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from itertools import product
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import residuum as rs
from experiments import RESULTS
from experiments.counting import LEVELS, count_matches, name_held_out
from experiments.field_rows import (
    ARMS,
    CHOSEN,
    MOST,
    ROWS,
    TRUE,
    WITHOUT_DATA,
    Row,
    arm_of,
    frozen,
    identity,
    pooled,
    settings,
)
from experiments.field_victims import Victim, from_file, load_victim
from experiments.pages import field as tables_of_field
from experiments.programs import run_program
from experiments.seeds import draw_seeds
from residuum import plugins
from residuum.attacks.registry import every_attack
from residuum.errors import InputError, PluginError, ResiduumError, require_known
from residuum.evaluation.matching import display, greedy
from residuum.records import Reconstruction, write_json
from residuum.records.inputs import read_npz, write_npz
from residuum.records.rundir import digest, environment, read_json, require_device, write_atomic
from residuum.similarity import ncc

SEEDS_FILE = RESULTS / "field-seeds.json"
SHOWN = 6  # best pairs kept for pictures
ROOT = Path(rs.__file__).parent
# Of the code of residuum as this process has it.
PACKAGE = digest(
    *(f"{file.relative_to(ROOT)}\n{file.read_text('utf-8')}" for file in sorted(ROOT.rglob("*.py")))
)
Found = tuple[Tensor, Tensor, dict[str, Any]]  # candidates, those chosen without the data, facts


def similarity(x: Tensor, samples: Tensor, span: Tensor | None) -> Tensor:
    """Return the (m, n) similarity of candidates and samples, at most 1."""
    if span is None:
        return ncc(x, samples).abs()
    errors = (x.flatten(1)[:, None] - samples.flatten(1)[None]).abs() / span
    return 1 - errors.amax(2)


def figures(x: Tensor, chosen: Tensor, victim: Victim, device: str) -> dict[str, Any]:
    """Count matches of the training set and of held-out samples, and those selected without the data."""
    n, x = len(victim.x), x.to(device).float()
    span = None if victim.span is None else victim.span.to(device)
    counts_of = []
    for samples in (victim.x.to(device), victim.held[:n].to(device)):
        counts = count_matches(x, samples, victim.mean, similarity(x, samples, span))
        if len(chosen):
            best = similarity(chosen.to(device).float(), samples, span).amax(1)
            counts["right"] = int((best > TRUE).sum())
        counts_of.append(counts)
    return {
        "candidates": len(x),
        "chosen": len(chosen),
        **counts_of[0],
        **name_held_out(counts_of[1]),
    }


def pairs(x: Tensor, victim: Victim) -> np.ndarray:
    """Return (2, SHOWN, *shape) bytes: the best candidates, right way up, and the samples that they match."""
    similar = ncc(x.float(), victim.x)
    match = greedy(similar.abs().double().numpy())
    best = np.argsort(-match.value)[:SHOWN]
    candidate = match.candidate[best]
    sign = similar[candidate, best].sign().reshape(-1, *[1] * (x.ndim - 1))
    images = [display(samples, None) for samples in (x[candidate].float() * sign, victim.x[best])]
    return (255 * torch.stack(images)).round().to(torch.uint8).numpy()


class VictimAttacks:
    """Attacks on one network, one after the other. Their candidates are stored next to the network."""

    def __init__(self, row: Row, victim: Victim, cache: Path, device: str, tiny: bool) -> None:
        self.row, self.victim, self.cache = row, victim, cache
        self.device, self.tiny = device, tiny

    def candidates(self, arm: str) -> Found:
        """Return the candidates of an attack, from their file or from a new run."""
        code_digest = digest(*code(self.row, arm).values())
        path = self.cache.with_name(f"{self.cache.stem}-{code_digest[:12]}.candidates")
        return from_file(path, partial(self.run, arm))

    def run(self, arm: str) -> Found:
        """Run an attack with its settings. If it does not apply, the reason is returned."""
        n, nothing = len(self.victim.x), self.victim.x[:0]
        if arm == "other images":
            return self.victim.held[n : 3 * n], nothing, {"seconds": 0.0}
        if arm == "together":
            results = [self.candidates(arm_name) for arm_name in pooled(self.row)]
            ran = [result for result in results if "refused" not in result[2]]
            seconds = sum(result[2]["seconds"] for result in ran)
            x = torch.cat([nothing, *(result[0] for result in ran)])
            chosen = torch.cat([nothing, *(result[1] for result in ran)])
            return x, chosen, {"seconds": seconds}
        seed = self.victim.training["seed"] % 1000
        device = "cpu" if arm == "corners" else self.device
        config = settings(self.row, arm).changed(seed=seed, device=device)
        if self.tiny:
            config = config.changed(
                **config.select_settings({"steps": 20, "restarts": 1, "seconds": 2.0})
            )
        try:
            reconstruction = rs.attack(
                self.victim.network, self.victim.knowledge(arm_of(arm).grants), config
            )
        except PluginError:  # a fault, which the next run tries again, and no refusal
            raise
        except ResiduumError as problem:
            return nothing, nothing, {"refused": problem.message}
        shape = self.victim.x.shape[1:]
        x = reconstruction.x.float().cpu()[: MOST * n].reshape(-1, *shape)
        return (
            x,
            selected_candidates(reconstruction).cpu().reshape(-1, *shape),
            description(reconstruction),
        )


def selected_candidates(reconstruction: Reconstruction) -> Tensor:
    """Return the candidates that the attack selects without the data."""
    if reconstruction.selection is None:
        return reconstruction.x[:0].float()
    return reconstruction.selection.x[reconstruction.selection.confidence >= CHOSEN].float()


def description(reconstruction: Reconstruction) -> dict[str, Any]:
    """Describe one run."""
    granted = [fact for fact in reconstruction.knowledge.known_names if fact != "provenance"]
    return {
        "seconds": reconstruction.seconds,
        "granted": granted,
        "status": sorted({*reconstruction.status}),
        "settings": reconstruction.settings,
    }


def job(
    name: str,
    k: int,
    seeds: list[int],
    arms: Sequence[str],
    folder: str,
    out: str,
    device: str,
    tiny: bool,
    end: float,
) -> list[str]:
    """Run the attacks on one network that have no result, or a result of other settings.

    Every attack writes a file of its own as soon as it is scored.

    Returns:
        The attacks that failed.
    """
    torch.set_num_threads(1)
    row, key = (ROWS[name].tiny if tiny else ROWS[name]), f"{name}-{k}"
    folder_of_results, victim_digest = Path(out) / "parts", digest(identity(row), seeds)[:12]
    cache = Path(out) / "victims" / f"{key}-{victim_digest}.pt"
    missing = [
        arm
        for arm in arms
        if not is_finished(folder_of_results / f"{key}-{arm}.json", row, arm, seeds[k])
    ]
    failed: list[str] = []
    if not missing or time.time() > end:
        return failed
    victim = load_victim(row, k, seeds, folder, device, cache)
    attacked = VictimAttacks(row, victim, cache, device, tiny)
    for arm in missing:
        if time.time() > end:
            break
        try:
            x, chosen, result = attacked.candidates(arm)
            picture = folder_of_results / f"{key}-{arm}.npz"
            picture.unlink(missing_ok=True)
            if len(x):
                result |= figures(x, chosen, victim, device)
                if k == 0 and victim.x.ndim == 4:
                    write_npz(picture, {"pairs": pairs(x, victim)})
        except Exception as problem:  # noqa: BLE001  the others go on, the next run tries again
            print(f"{key} {arm}: FAILED, {plugins.describe(problem)}", flush=True)
            failed.append(f"{arm} on {key}")
            continue
        entry = {"row": name, "victim": k, "arm": arm, "of": victim.training, "found": result}
        where = {"environment": environment(device), **code(row, arm)}
        write_json(folder_of_results / f"{key}-{arm}.json", {**entry, **where})
        text = " ".join(
            f"{v} {result[str(v)]} ({result[f'{v} held out']})" for v in LEVELS if len(x)
        )
        took = result.get("refused") or f"{result['seconds']:.1f} s, {text}"
        print(f"{time.strftime('%H:%M:%S')} {key} {arm}: {took}", flush=True)
    return failed


def code(row: Row, arm: str) -> dict[str, Any]:
    """Return hashes of the code and of the settings, and the versions of plug-ins of a plug-in attack."""
    brought = [f"{plugin.name} {plugin.version}" for plugin in plugins.load() if not plugin.error]
    versions = [] if arm in ARMS else brought
    return {"package": PACKAGE, "settings": frozen(row, arm), "plugins": versions}


def is_finished(path: Path, row: Row, arm: str, seed: int) -> bool:
    """Return True if a result is of this network and attack. The version of residuum may differ."""
    entry = read_json(path)
    same = all(entry.get(key) == code(row, arm)[key] for key in ("settings", "plugins"))
    return same and entry["of"]["seed"] == seed


def run(
    folder: Path | None,
    out: Path,
    *,
    device: str = "cpu",
    workers: int = 2,
    cores: int = 1,
    names: Sequence[str] = WITHOUT_DATA,
    attacks: Sequence[str] = (),
    tiny: bool = False,
    seconds: float = float("inf"),
) -> dict[str, Any]:
    """Run every attack that ``out`` does not have. Convnets run on ``cores`` processes of their own."""
    for plugin in plugins.load():
        if plugin.error:
            print(
                f"plug-in {plugin.name} {plugin.version} is left out, {plugin.error}",
                file=sys.stderr,
            )
    brought = [name for name, plugin in every_attack().items() if plugin().is_plugin]
    check_request(folder, device, min(workers, cores), names, attacks, brought)
    for subfolder in ("parts", "victims"):
        (out / subfolder).mkdir(parents=True, exist_ok=True)
    seeds = json.loads(SEEDS_FILE.read_text())["victims"]
    start, context = time.time(), get_context("spawn")
    root = "" if folder is None else str(folder / "claim")
    with (
        ProcessPoolExecutor(workers, context, exit_with_parent, (os.getpid(),)) as shared,
        ProcessPoolExecutor(cores, context, exit_with_parent, (os.getpid(),)) as convnet_workers,
    ):
        futures, failed = [], list[str]()
        rows = {name: ROWS[name].tiny if tiny else ROWS[name] for name in names}
        # The first victim of every row before the second of any: a run cut short has all rows.
        for k, (name, row) in product(range(3), rows.items()):
            if k < row.victims:
                arms = [arm for arm in (*row.arms, *brought) if not attacks or arm in attacks]
                where, sort_key = (
                    (convnet_workers, "cpu") if row.kind == "convnet" else (shared, device)
                )
                arguments = (arms, root, str(out), sort_key, tiny, start + seconds)
                futures.append(where.submit(job, name, k, seeds[name], *arguments))
        try:
            for finished in as_completed(futures):
                failed += finished.result()
                collect(out)
        except BaseException:  # Ctrl-C, a victim that cannot be made: what waits is not begun
            for pool in (shared, convnet_workers):
                pool.shutdown(wait=False, cancel_futures=True)
            for worker in active_children():
                worker.terminate()
            raise
    print(f"{time.time() - start:.0f} s in all", flush=True)
    return {**collect(out), "failed": failed}


def check_request(
    folder: Path | None,
    device: str,
    workers: int,
    names: Sequence[str],
    attacks: Sequence[str],
    brought: Sequence[str],
) -> None:
    """Refuse before the first computation what cannot be run."""
    require_device(device)
    if workers < 1:
        raise InputError(f"At least one process is needed; got {workers}.", "Raise --workers.")
    names_of_attacks = [*ARMS, *brought]
    for name in attacks:
        require_known(name, names_of_attacks, "No attack")
        if name not in brought and not any(name in ROWS[row].arms for row in names):
            raise InputError(f"{name} is run on none of these rows.", "Choose other --rows.")
    for name in names:
        if name not in WITHOUT_DATA:
            file = "FOLDER" if folder is None else folder / "claim" / f"{ROWS[name].data}.npz"
            if folder is None or not Path(file).is_file():
                make = "Make it by python -m experiments.image_data SOURCE FOLDER."
                raise InputError(f"{name} needs images; there is no {file}.", make)


def exit_with_parent(parent: int) -> None:
    """Make a worker exit when the process that started it has ended."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def collect(out: Path) -> dict[str, Any]:
    """Join all results into one file, and all pictures into another."""
    done: dict[str, Any] = {"environments": [], "victims": {}, "settings": {}}
    files = [read_json(path) for path in sorted((out / "parts").glob("*.json"))]
    entries = [
        entry for entry in files if entry.get("row") in ROWS
    ]  # others are damaged, or of old rows
    done["plugins"] = sorted({plugin for entry in entries for plugin in entry["plugins"]})
    # As every part was run: a folder may hold some from before a change and some from after it.
    sums: dict[str, Any] = {
        "package": sorted({entry["package"] for entry in entries}),
        "settings": {},
    }
    done["sha256"] = sums
    for entry in sorted(entries, key=sort_key):
        scores, name, arm = entry["found"], entry["row"], entry["arm"]
        ran = sums["settings"].setdefault(name, {}).setdefault(arm, [])
        ran += [entry["settings"]] * (entry["settings"] not in ran)
        if entry["environment"] not in done["environments"]:
            done["environments"].append(entry["environment"])
        victim = done["victims"].setdefault(f"{name}/{entry['victim']}", {"victim": entry["of"]})
        settings = scores.pop("settings", None)
        if settings is not None and entry["victim"] == 0:
            done["settings"].setdefault(name, {})[arm] = changed_settings(settings)
        victim.setdefault("arms", {})[arm] = scores
    write_json(out / "field.json", done)
    pictures = {
        path.stem: read_npz(path)["pairs"] for path in sorted((out / "parts").glob("*.npz"))
    }
    write_npz(out / "field-pictures.npz", pictures)
    return done


def changed_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that differ from the defaults, and the sizes of an attack."""
    usual = rs.attacks.attack_class(settings["attack"])().to_json() | {"attack": None}
    sizes = ("restarts", "candidates", "steps")
    return {k: v for k, v in settings.items() if k in sizes or v != usual.get(k)}


def sort_key(entry: dict[str, Any]) -> tuple[int, int, int]:
    """Return the place of a result: rows, victims and attacks in their order, plug-ins last."""
    arms, arm = list(ROWS[entry["row"]].arms), entry["arm"]
    return [*ROWS].index(entry["row"]), entry["victim"], (*arms, arm).index(arm)


def draw() -> None:
    """Draw the seeds of every network."""
    draw_seeds(SEEDS_FILE, victims={name: row.victims for name, row in ROWS.items()})


def picture(archive: Path, out: Path, names: Sequence[str]) -> None:
    """Draw the best candidates above the samples that they match, in two columns of networks."""
    from PIL import Image

    side, wide, high = 33, SHOWN * 33 + 8, 2 * 33 + 6
    canvas = np.full((-(-len(names) // 2) * high, 2 * wide, 3), 255, np.uint8)
    with np.load(archive) as kept_pairs:
        for k, name in enumerate(names):
            require_known(name, kept_pairs, "No pictures of")
            for line, column in np.ndindex(2, SHOWN):
                image = kept_pairs[name][line, column]
                color = np.repeat(image.transpose(1, 2, 0), 3 // image.shape[0], axis=2)
                large = Image.fromarray(color).resize((32, 32), Image.Resampling.NEAREST)
                top, column_offset = k // 2 * high + line * side, k % 2 * wide + column * side
                canvas[top : top + 32, column_offset : column_offset + 32] = np.asarray(large)
    Image.fromarray(canvas).quantize(256).save(out, optimize=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and run the command."""
    text = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m experiments.field", description=__doc__, formatter_class=text
    )
    commands = parser.add_subparsers(dest="command")
    commands.add_parser("draw", help="draw the seeds after the settings are committed")
    command = commands.add_parser("run", help="train networks, attack and score them")
    command.add_argument("folder", type=Path, nargs="?", help="folder of the images")
    command.add_argument("out", type=Path)
    command.add_argument("--device", default="cpu")
    command.add_argument("--workers", type=int, default=2, help="number of processes on the device")
    command.add_argument(
        "--cores", type=int, default=1, help="number of processes for convnets, on the CPU"
    )
    command.add_argument("--rows", nargs="*", choices=tuple(ROWS), default=None)
    command.add_argument("--attacks", nargs="*", default=[], help="run only these attacks")
    command.add_argument(
        "--tiny", action="store_true", help="run all code on tiny networks, into OUT/tiny"
    )
    command.add_argument(
        "--seconds", type=float, default=float("inf"), help="start no attack after this time"
    )
    command = commands.add_parser("page", help="write docs/field.md with the results")
    command.add_argument("out", type=Path)
    command.add_argument("page", type=Path)
    command = commands.add_parser("picture", help="draw the best candidates")
    command.add_argument("out", type=Path)
    command.add_argument("png", type=Path)
    command.add_argument("--shown", nargs="*", default=PICTURED)
    words = sys.argv[1:] if arguments is None else arguments
    return run_program(partial(perform, parser.parse_args(words or ["run", "runs/field"])))


def perform(options: argparse.Namespace) -> int:
    """Run one command."""
    if options.command == "draw":
        draw()
    elif options.command == "picture":
        picture(require_result(options.out / "field-pictures.npz"), options.png, options.shown)
    elif options.command == "page":
        done = read_json(require_result(options.out / "field.json"))
        if not done.get("victims"):
            raise InputError(f"{options.out} holds nothing that was found.", "Run attacks first.")
        text = tables_of_field.PAGE.read_text(encoding="utf-8")
        write_atomic(options.page, tables_of_field.page(done, text))
    else:
        folder = options.folder if str(options.folder or ".") != "." else None
        names = options.rows or (WITHOUT_DATA if folder is None else tuple(ROWS))
        done = run(
            folder,
            options.out / "tiny" if options.tiny else options.out,
            device=options.device,
            workers=options.workers,
            cores=options.cores,
            names=names,
            attacks=options.attacks,
            tiny=options.tiny,
            seconds=options.seconds,
        )
        print(tables_of_field.field(done))
        if done["failed"]:
            print(f"FAILED: {', '.join(done['failed'])}", file=sys.stderr)
        return 1 if done["failed"] else 0
    return 0


def require_result(path: Path) -> Path:
    """Return the path of a file that ``run`` writes, and refuse a missing file."""
    if not path.is_file():
        raise InputError(f"There is no {path}.", "Run the attacks into that folder first.")
    return path


PICTURED = (
    "cifar-500-0-haim2022",
    "cifar-500-0-together",
    "cifar-100-0-haim2022",
    "cifar-100-0-together",
    "cifar-1000-0-together",
    "mnist-500-0-together",
    "sklearn-100-0-together",
    "convnet-20-0-together",
)

if __name__ == "__main__":
    sys.exit(main())
