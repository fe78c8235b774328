"""Which guesses are worth making and judging, by what steps were measured to cost here. It knows nothing of the drafters that ask.

Everything is counted in plain steps, T(1). A guess that is right saves one.
"""
from __future__ import annotations

from ..engine.option import Option
from .parts import Parts

__all__ = ["confidence_option", "floor_option", "least_node", "least_path"]

_JUDGED = 8                    # a usual number of nodes
_MOST = 0.9
_MEASURED = " The default follows from what a step was measured to cost here."


def least_path(parts: Parts) -> float:
    """The least probability of a path behind which another pass of the head pays; 0 where nothing was measured.

    A pass costs c and brings, behind a path of probability p, p times the chance of its next token, supposed to be a half: p = 2 c.
    """
    return 0.0 if parts.pass_cost is None else round(min(_MOST, 2 * parts.pass_cost), 2)


def least_node(parts: Parts) -> float:
    """The least probability of a node that is worth judging: what one more token in the target's forward costs; 0 where nothing was measured."""
    if parts.verify_cost is None:
        return 0.0
    slope = (parts.verify_cost(1 + _JUDGED) - parts.verify_cost(1)) / _JUDGED
    return round(min(_MOST, max(0.0, slope)), 2)


def confidence_option(parts: Parts) -> Option:
    default = least_path(parts)
    return Option("confidence", "Stop when unsure", "number", default, "Another level is grown only while the head gives one of the paths at least "
                  f"this probability; 0 never stops.{_MEASURED if default else ''}", 0, 0.99)


def floor_option(parts: Parts) -> Option:
    default = least_node(parts)
    return Option("floor", "Least probability", "number", default, "Nodes less probable than this, along their whole path and by the heads' word, "
                  f"are not proposed; 0 proposes K in any case.{_MEASURED if default else ''}", 0, 0.99)
