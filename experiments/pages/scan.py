"""Tables of ``docs/scan.md``: images reconstructed from files as people save them."""

from __future__ import annotations

from experiments.pages.tables import grid, means, once, short, table, victims_of, with_chance

FILES = {
    "momentum-500": "torch.save after SGD with momentum, 3072-1000-1000-1, n=500",
    "sklearn-100": "joblib.dump of `MLPClassifier((200,))`, n=100, centered",
    "sklearn-100-raw": "the same, pixels in [0, 1]",
    "adam-100": "torch.save after Adam, 3072-1000-10, n=100, centered",
    "adam-100-raw": "the same, pixels in [0, 1]",
}


@table
def surfaces() -> str:
    """Compare files as saved with the same files after everything but the weights was removed."""
    rows = []
    for name, title in FILES.items():
        file = "surfaces-h200" if name == "momentum-500" else "surfaces-cpu"
        for arm in ("as saved", "weights alone"):
            entries = [e[arm]["all"] for e in victims_of(file, name) if "all" in e.get(arm, {})]
            if entries:
                figures = means(entries)
                above = ", ".join(str(e["0.9"]) for e in entries)
                rows.append(
                    [
                        f"{title}, {len(entries)} files",
                        "stripped" if arm == "weights alone" else arm,
                        with_chance(figures, "0.8"),
                        f"{with_chance(figures, '0.9')}: {above}",
                        f"{short(figures['recovered'])} ({short(figures['expected'])})",
                        f"{figures['seconds']:.0f}",
                    ]
                )
    head = "file | attacked | NCC > 0.8 (held out) | NCC > 0.9 (held out): per file"
    return grid(f"{head} | recovered (chance) | seconds", once(rows), text_columns=2)
