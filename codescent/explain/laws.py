"""In: a law of scaling that is fitted to points. Out: its name, its meaning and what it says of them, in a language.
Does not fit (study/laws.py does)."""

from __future__ import annotations

from collections.abc import Mapping

from codescent.base.amounts import of_share
from codescent.explain.language import Language
from codescent.study.laws import AMDAHL, GUSTAFSON, UNIVERSAL
from codescent.study.result import Fit


def law_name(law: str, say: Language) -> str:
    """A law, by its name in `Fit`, in a table."""
    return say("universal (USL)") if law == UNIVERSAL.name else law


def law_meanings(say: Language) -> tuple[str, ...]:
    """A sentence for each law."""
    return (
        say("Amdahl: a share of the work is serial. It bounds the speed-up, however many workers there are."),
        say("Gustafson: the work grows with the workers, the serial part does not."),
        say("Universal: workers also wait for each other (contention), and agree with each other (coherency)."),
    )


def law_says(fit: Fit, say: Language) -> str:
    """What a law says of its points, and how far it is from the farthest that it was fitted to."""
    if fit.worst is None:
        return say("There are too few points.")
    values = {name: found.value for name, found in fit.parameters.items()}
    says = {AMDAHL.name: _amdahl, GUSTAFSON.name: _gustafson, UNIVERSAL.name: _universal}[fit.law](values, say)
    differs = say("the farthest point differs by {share}", share=of_share(fit.worst))
    return f"{says}; {differs}"


def _amdahl(values: Mapping[str, float], say: Language) -> str:
    share = values["serial share"]
    most = say("at most {times} times as fast", times=f"{1 / share:.3g}") if share > 0 else say("no limit shows")
    return say("serial share {share}: {most}", share=of_share(share), most=most)


def _gustafson(values: Mapping[str, float], say: Language) -> str:
    share = values["serial share"]
    adds = of_share(1 - share)
    return say("serial share {share}: each further worker adds {adds} of one", share=of_share(share), adds=adds)


def _universal(values: Mapping[str, float], say: Language) -> str:
    contention, coherency = values["contention"], values["coherency"]
    best = say("no maximum shows")
    if coherency > 1e-9:  # Gunther 2007, equation 4.33
        workers = max(1, round((max(0.0, 1 - contention) / coherency) ** 0.5))
        best = say.many("fastest with {number} worker", "fastest with {number} workers", workers)
    return say(
        "contention {contention}, coherency {coherency}: {best}",
        contention=of_share(contention), coherency=of_share(coherency), best=best,
    )  # fmt: skip
