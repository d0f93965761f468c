"""The words that reports and commands use, each in a sentence or two.

The report carries them at its end and links to them from its first screen, ``residuum audit --explain``
prints those it used, and the site of ``docs/`` lists them.
"""

from __future__ import annotations

import re
from functools import cache

GLOSSARY = {
    "attack": "A method that makes up candidates from what is released, without seeing the training data. "
    "Every attack that decides is one test.",
    "attack suite": "All attacks that a version of residuum knows. An audit names the suite it ran; a newer "
    "one may find more.",
    "baseline": "A simple attack that is run beside the others. Its count is reported and never decides.",
    "budget": "The time an audit may take. More of it means more restarts and longer attacks.",
    "candidate": "One sample that an attack made up. Most candidates resemble nothing.",
    "certificate": "A calculation with the training data about the weights, such as how well the samples "
    "explain them. It never decides.",
    "chance": "How many samples would match as closely if the network had never seen them: the same count "
    "on held-out samples.",
    "change from the start": "The released weights less those that training began from. It is attacked where "
    "the start is granted or found beside the file.",
    "class-like": "The mildest grade of a leak: what came back is hardly nearer to the training sample than "
    "an average of public samples of its class.",
    "control": "A check that the counting itself works, made with candidates that hold nothing of the "
    "network. Where one fails, nothing is decided.",
    "explained": "An attack explains the weights when its candidates leave a residual at most half as large "
    "as on a permuted target. Only then does finding nothing mean something.",
    "exposure": "Which training samples are most at risk, calculated by somebody who has the data. It "
    "stands beside the verdict.",
    "granted": "Told to the attacker by the person who audits, beside the weights: a range of values, a "
    "mean. The more is granted, the stronger the attacker.",
    "held-out": "Of samples: of the same kind as the training samples, and never seen by the network. They "
    "tell what chance gives.",
    "inconclusive": "The audit can say neither that the release leaks nor that it does not. The next step "
    "says what would help.",
    "KKT": "Conditions that weights fulfil when training has gone on for long: they are then a weighted sum "
    "of gradients at the training samples, which is what some attacks solve for.",
    "leak": "More training samples came back than chance explains, at a level of 1% over all attacks "
    "together.",
    "membership": "Whether somebody who already has a record could confirm that it was trained on. It stands "
    "beside the verdict.",
    "NCC": "Normalised cross-correlation, the closeness of two samples: 1 for the same up to brightness and "
    "contrast, 0 for unrelated ones.",
    "near-copy": "The worst grade of a leak: what came back is nearer to the training sample, by a quarter, "
    "than any held-out sample and than the mean of its class.",
    "no leak found": "None of these attacks brought back more than chance, and they would have noticed: they "
    "explain the weights and get samples back from positive controls. It is no guarantee.",
    "optimiser state": "Running averages of gradients that training programs save beside the weights. They "
    "can give samples away, and nobody needs them to use a network.",
    "p": "How likely chance alone would give as many matches. A leak needs 0.01 or less, over all attacks "
    "together.",
    "permuted target": "The same weights in a random order. They hold nothing to find, so what an attack "
    "leaves unexplained there is what failing looks like.",
    "positive control": "A network of the same architecture that is trained on held-out samples until it "
    "memorizes them, and attacked in the same way. It shows whether the audit would have noticed a leak.",
    "recovered": "A training sample counts as recovered when a candidate matches it more closely than 99% of "
    "held-out samples are matched.",
    "residual": "The share of the weights that an attack's candidates leave unexplained: 0 nothing, 1 all.",
    "resembles": "The middle grade of a leak: what came back is nearer to the training sample, by a quarter, "
    "than the mean of its class, but no copy.",
    "restart": "One run of an attack from random candidates. What several restarts agree on is more likely "
    "real.",
    "surface": "Something in a release that can be attacked: the weights, their change from the start, the "
    "optimiser state, records stored outright.",
    "training sample": "A record that the network was trained on: an image, a row of a table.",
    "uniqueness": "How much of a reconstruction every other training set that explains the weights would "
    "have to share.",
    "verdict": "The answer of an audit: leak, no leak found, or inconclusive.",
    "vouch": "The word of the person who audits that network and records were read rightly, where the audit "
    "cannot see it.",
    "weights": "The numbers that make up a trained network: what is released.",
}


@cache
def pattern() -> re.Pattern[str]:
    """Finds words of the glossary, plurals included; the longest first."""
    words = sorted(GLOSSARY, key=len, reverse=True)
    # One letter and abbreviations are words only as they are written.
    forms = [
        word if word.isupper() or len(word) < 2 else f"(?i:{re.escape(word)})" for word in words
    ]
    return re.compile(rf"\b({'|'.join(forms)})(?:e?s)?\b")


def used(text: str) -> tuple[str, ...]:
    """The words of the glossary that a text uses, in its order."""
    found = {match[1].lower() for match in pattern().finditer(text)}
    return tuple(word for word in GLOSSARY if word.lower() in found)
