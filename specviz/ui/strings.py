"""Every sentence on the page that is not a figure's title. It knows nothing of Gradio, models or the engine."""
from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["EMPTY_CHAT", "HEADLINE", "NAME", "VERIFICATIONS", "configuration", "continue_label", "dropped", "footer", "load_failed",
           "loading", "measuring", "meter", "method_choice", "method_note", "not_kept", "outcome", "progress", "ready",
           "speculation_state", "status_html", "status_line", "unloaded", "verification_note", "verification_word"]

NAME = "specviz"
HEADLINE = "A small guess, one big check: watch a language model speed up without changing what it says."
EMPTY_CHAT = "### Ask something\nEvery token of the answer is coloured by how it came about. Or begin with one of these:"
UNAVAILABLE = "unavailable"

ENDINGS = {"length": "length limit reached", "stop": "stop string found", "cancelled": "stopped", "error": "ended by an error"}
# Rules of verification: name, words for the menu, note below it. A test holds the names, and what is lossy, to the engine's table.
VERIFICATIONS: dict[str, tuple[str, str]] = {
    "rejection": ("Rejection sampling",
                  "Accepts x with chance min(1, p/q), else draws from the residual. The distribution is the target's."),
    "shared-noise": ("Shared noise: plain sampling's own text", "Target and drafter draw with the same noise; a guess counts if it is the "
                     "target's own draw. The text is plain sampling's with this seed, token for token."),
    "block": ("Block verification", "Judges a chain as a whole and keeps the longest block that passes. The distribution is the target's. "
              "Trees are judged by rejection."),
    "typical": ("Typical acceptance (lossy)", "LOSSY: keeps what is likely enough, p above min(0.09, 0.3·exp(−H)). Neither plain "
                "sampling's text nor the target's distribution."),
}
STILL_MEASURING = "measuring plain decoding …"
CONTEXT_RULE = ("What the conversation fills of the model's context. Part of it stays free for the answer: the new tokens asked for, at "
                "most a quarter. Where the rest is too small, the oldest turns leave the prompt; the system prompt stays.")
WINDOW = 8                   # so many steps without a draft, one after the other, count as a pause


def method_choice(label: str, available: bool) -> str:
    """A method's name in the menu; page.css greys the ones that end in this word."""
    return label if available else f"{label} · {UNAVAILABLE}"


def method_note(summary: str, reason: str, note: str) -> str:
    """The line under the method menu."""
    if reason:
        return f"Unavailable: {reason.rstrip('.')}."
    return " ".join(f"{part[:1].upper()}{part[1:].rstrip('.')}." for part in (summary, note) if part)


def configuration(config: Mapping[str, Any], *, model: bool = True) -> list[str]:
    """The effective configuration in words, as read back from the engine; what it does not say is left out."""
    words = [str(config["target"])] if model and config.get("target") else []
    words += [str(config[name]) for name in ("dtype", "quantization") if config.get(name) and config[name] != "none"]
    device, threads = config.get("device"), config.get("threads")
    if device:
        words.append(f"{device}, {threads} thread{'s' * (threads != 1)}" if threads else str(device))
    return words


def status_line(state: str, words: Sequence[str]) -> str:
    """state · method · effective configuration · progress."""
    return " · ".join([state, *(word for word in words if word)])


def ready(config: Mapping[str, Any]) -> str:
    return status_line("ready", configuration(config))


def load_failed(message: str) -> str:
    return f"failed: {message.rstrip('.')}. Recorded runs can still be played."


def verification_note(name: str | None) -> str:
    """The line under the menu of verification rules."""
    return VERIFICATIONS.get(name or "", ("", ""))[1]


def verification_word(meta: Mapping[str, Any]) -> str:
    """The rule's name for the status line; nothing for the usual one."""
    name = str(meta.get("verification") or "rejection")
    return "" if name == "rejection" else VERIFICATIONS.get(name, (name, ""))[0].partition(":")[0]


def unloaded(message: str) -> str:
    return f"unloaded: {message}"


def speculation_state(method: str, drafted: Sequence[int], draft_stop: str) -> str:
    """Whether speculation works, and why not: "active", "off: ..." or "paused: ...".

    drafted: drafted tokens of the decode steps so far. draft_stop: why the last step's drafting ended, in the drafter's words.
    """
    if method == "plain":
        return "off: the method is plain decoding"
    if len(drafted) >= WINDOW and not any(drafted[-WINDOW:]):
        return f"paused: {draft_stop or 'no drafts'}"
    return "active"


def progress(num_steps: int, stats: Mapping[str, Any] | None) -> list[str]:
    words = [f"step {num_steps}"] if num_steps else ["reading the prompt"]
    rate = (stats or {}).get("tokens_per_s")
    return words + ([f"{rate:.1f} tokens/s"] if rate else [])


def loading(message: str, fraction: float | None) -> str:
    percent = "" if fraction is None else f" {100 * fraction:.0f} %"
    return f"loading: {message}{percent}"


def outcome(stats: Mapping[str, Any]) -> list[str]:
    """How a run went, for the status line."""
    words = [f"{stats['num_tokens']} tokens in {stats['num_steps']} steps"] if stats.get("num_steps") else []
    return words + ([f"{stats['speed_up']:.2f}× (measured)"] if stats.get("speed_up") is not None else [])


def continue_label(num_done: int, num_tokens: int) -> str:
    return f"Continue measuring plain decoding ({num_done} of {num_tokens} tokens so far)"


def measuring(num_done: int, num_tokens: int) -> str:
    return f"measuring plain decoding for comparison · {num_done} of {num_tokens} tokens"


def meter(num_tokens: int, context: int, num_dropped: int) -> dict[str, Any]:
    """What the context meter shows: its text, its filled share from 0 to 1, what was left out, and the rule behind it."""
    return {"text": f"{num_tokens:,} of {context:,} tokens", "share": min(1.0, num_tokens / context), "dropped": dropped(num_dropped),
            "rule": CONTEXT_RULE}


def dropped(num_turns: int) -> str:
    if not num_turns:
        return ""
    return "1 earlier turn is no longer in the prompt" if num_turns == 1 else f"{num_turns} earlier turns are no longer in the prompt"


def not_kept(public: bool, history: bool) -> str:
    """Why the browser keeps no conversations; empty if it does."""
    if public:
        return "Conversations are not kept: others can reach this page, and the next person at this browser could read them."
    return "" if history else "Conversations are not kept: the program was started with --no-history."


def footer(stats: Mapping[str, Any] | None, reason: str, *, still_measuring: bool = False, num_dropped: int = 0) -> str:
    """The line under an answer. Figures that were not measured are left out; nothing here is a prediction."""
    stats = stats or {}
    words = []
    if (rate := stats.get("tokens_per_s")) is not None:
        words.append(f"{rate:.1f} tokens/s")
    if (speed_up := stats.get("speed_up")) is not None:
        words.append(f"{speed_up:.2f}× plain decoding")
    elif still_measuring:
        words.append(STILL_MEASURING)
    if (per_step := stats.get("tokens_per_step")) is not None and stats.get("num_draft_tokens"):
        words.append(f"{per_step:.2f} tokens per step")
    if stats.get("num_draft_tokens"):
        words.append(f"{stats['num_accepted_draft_tokens']} of {stats['num_draft_tokens']} drafts accepted")
    if (num_tokens := stats.get("num_tokens")) is not None:
        words.append(f"{num_tokens} token{'s' * (num_tokens != 1)}")
    if reason in ENDINGS:
        words.append(ENDINGS[reason])
    if stats.get("repeating"):
        words.append("repeating text, not representative")
    if num_dropped:
        words.append(dropped(num_dropped))
    return " · ".join(words)


def status_html(line: str) -> str:
    """The status line as markup: a dot in the colour of its state, then the text, escaped."""
    state = line.split(" · ")[0].split(":")[0].strip()
    state = "measuring" if state.startswith("measuring") else state
    kind = {"active": "active", "ready": "ready", "off": "off", "paused": "off", "unloaded": "off", "loading": "busy", "waiting": "busy",
            "measuring": "busy", "failed": "failed", "error": "failed"}.get(state, "ready")
    text = html.escape(line)
    if state in ("active", "off", "paused"):
        text = f"speculation {text}"
    dot = '<span class="page-dot" aria-hidden="true"></span>'
    spoken = "polite" if kind in ("ready", "failed") else "off"          # not four times a second
    return f'<div class="page-status" role="status" aria-live="{spoken}" data-state="{kind}">{dot}<span>{text}</span></div>'
