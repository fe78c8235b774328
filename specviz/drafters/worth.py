"""Which guesses are worth making and judging, by what steps were measured to cost here. It knows nothing of the drafters that ask.

Everything is counted in plain steps, T(1). A guess that is right saves one.
"""
from __future__ import annotations

from ..engine.drafting import DraftSettings
from ..engine.option import Option
from .parts import Parts

__all__ = ["confidence_option", "floor_option", "least_node", "least_path", "most_worth"]

_JUDGED = 8                    # a usual number of nodes
_MOST = 0.9
_NEXT = 0.35                   # chance that the guess behind a right one is right too
_FEW_NODES, _MOST_NODES = 4, 32
_MEASURED = " The default follows from what a step was measured to cost here."


def least_path(parts: Parts) -> float:
    """The least probability of a path behind which another pass of the head pays; 0 where nothing was measured.

    A pass costs c, judging its best guess s (`least_node`), and behind a path of probability p that guess is right with chance p times a: it
    pays from p = (c + s) / a on. a is supposed to be 0.35, less than the heads' acceptance behind an accepted guess, since heads trust their
    paths too much; on the default model speed was flat around what follows from it (between 0.45 and 0.8).
    """
    return 0.0 if parts.pass_cost is None else round(min(_MOST, (parts.pass_cost + least_node(parts)) / _NEXT), 2)


def least_node(parts: Parts) -> float:
    """The least probability of a node that is worth judging: what one more token in the target's forward costs; 0 where nothing was measured."""
    if parts.verify_cost is None:
        return 0.0
    slope = (parts.verify_cost(1 + _JUDGED) - parts.verify_cost(1)) / _JUDGED
    return round(min(_MOST, max(0.0, slope)), 2)


def most_worth(settings: DraftSettings) -> dict[str, int]:
    """For `drafting.limits_of`, of a drafter with `floor_option`: no more nodes than could be worth it, were half the guesses' probability spread
    evenly over them. Nothing where the option is off."""
    floor = settings.option("floor", 0.0)
    return {"": min(_MOST_NODES, max(_FEW_NODES, round(0.5 / floor)))} if floor > 0 else {}


def confidence_option(parts: Parts) -> Option:
    default = least_path(parts)
    return Option("confidence", "Stop when unsure", "number", default, "Another level is grown only while the head gives one of the paths at least "
                  f"this probability; 0 never stops.{_MEASURED if default else ''}", 0, 0.99)


def floor_option(parts: Parts) -> Option:
    default = least_node(parts)
    return Option("floor", "Least probability", "number", default, "Nodes less probable than this, along their whole path and by the heads' word, "
                  f"are not proposed; 0 proposes K in any case.{_MEASURED if default else ''}", 0, 0.99)
