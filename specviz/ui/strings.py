"""Every sentence on the page that is not a figure's title. It knows nothing of Gradio, models or the engine."""
from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["AUTO_K", "AUTO_K_INFO", "AUTO_K_WORD", "EMPTY_CHAT", "HEADLINE", "JOIN", "NAME", "NO_OPTIONS", "OPTIONS_HINT", "OPTIONS_TITLE", "VERIFICATIONS", "configuration",
           "continue_label", "disturbed", "dropped", "footer", "load_failed", "loading", "measuring", "meter", "meter_told",
           "method_choice", "method_note", "not_kept", "option_words", "outcome", "progress", "ready", "speculation_state", "status_html",
           "status_line", "unloaded", "verification_note", "verification_word", "waiting", "waiting_alone", "withheld"]

NAME = "specviz"
AUTO_K = "Autopilot: choose K step by step"
AUTO_K_INFO = "From what a step costs here and what was accepted lately; none where drafting does not pay."
AUTO_K_WORD = "K auto"
HEADLINE = "A small guess, one big check: watch a language model speed up without changing what it says."
EMPTY_CHAT = "### Ask something\nEvery token of the answer is coloured by how it came about. Or begin with one of these:"
UNAVAILABLE = "unavailable"

JOIN = "Join"
JOIN_TITLE = "Join from your own device"
JOIN_HERE = "On the same network as this machine."
JOIN_ANYWHERE = "From anywhere."
JOIN_PASSWORD = "It asks for a name and a password, which whoever runs this page will tell."
JOIN_OTHERS = "Does not open? Another address:"
JOIN_NONE = "No address was found under which others could reach this page. Is this machine on a network?"
JOIN_CLOSE = "Close"
GAVE_UP = "Stopped while it was waiting for its turn."
ENDINGS = {"length": "length limit reached", "stop": "stop string found", "cancelled": "stopped", "error": "ended by an error"}
# Rules of verification: name, words for the menu, note below it. A test holds the names, and what is lossy, to the engine's table.
VERIFICATIONS: dict[str, tuple[str, str]] = {
    "rejection": ("Rejection sampling",
                  "Accepts x with chance min(1, p/q), else draws from the residual. The distribution is the target's."),
    "shared-noise": ("Shared noise: plain sampling's own text", "Target and drafter draw with the same noise g: argmax(log p + g) and "
                     "argmax(log q + g). A guess counts if both agree. The text is plain sampling's with this seed, token for token."),
    "block": ("Block verification", "Judges a chain as a whole: r = min(r·p/q, 1) along it, and the longest block that passes by r is kept. The "
              "distribution is the target's. Trees are judged by rejection."),
    "typical": ("Typical acceptance (lossy)", "LOSSY: keeps what is likely enough, p above min(0.09, 0.3·exp(−H)). Neither plain "
                "sampling's text nor the target's distribution."),
}
OPTIONS_TITLE = "Options of this method"
OPTIONS_HINT = "They shape the drafts, and so the speed. By themselves they never change what the target says."
NO_OPTIONS = "This method has none."
STILL_MEASURING = "measuring plain decoding …"
CONTEXT_RULE = ("What the conversation fills of the model's context. Part of it stays free for the answer: the new tokens asked for, at "
                "most a quarter. Where the rest is too small, the oldest turns leave the prompt; the system prompt stays.")
TOLD_RULE = "What the server counted as the last prompt: its tokenizer and its count. The answer is not in it."
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
    linears = config.get("linears")
    if isinstance(linears, Mapping) and str(linears.get("kernel", "")).startswith("compiled"):
        words.append("compiled kernel")
    device, threads = config.get("device"), config.get("threads")
    if device:
        words.append(f"{device}, {threads} thread{'s' * (threads != 1)}" if threads else str(device))
    return words


def option_words(config: Mapping[str, Any]) -> str:
    """The method's options that are not at their defaults, for the status line."""
    options, changed = config.get("options") or {}, config.get("changed_options") or ()
    if not isinstance(options, Mapping) or not isinstance(changed, (list, tuple)):
        return ""
    return ", ".join(f"{str(name).replace('_', ' ')} {_option_word(options[name])}" for name in changed if name in options)


def _option_word(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)


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
    words += [withheld(stats)] if withheld(stats) else []
    return words + ([f"{stats['speed_up']:.2f}× (measured)"] if stats.get("speed_up") is not None else [])


def disturbed(what: str) -> str:
    """Why the times of a run are good for no comparison."""
    return f"measured while {what}"


def withheld(stats: Mapping[str, Any]) -> str:
    """Why a run's times say nothing about it alone; empty where they do."""
    if stats.get("shared"):
        return f"up to {stats.get('most_at_once', 2)} answers at once"
    return disturbed(stats["disturbed"]) if stats.get("disturbed") else ""


def waiting(place: int) -> str:
    """While an answer waits for its turn."""
    return "waiting · next in the queue" if place == 1 else f"waiting · number {place} in the queue"


def waiting_alone(num_answers: int, num_done: int, num_tokens: int) -> str:
    """While plain decoding waits to be measured."""
    others = "another measurement" if not num_answers else "1 answer" if num_answers == 1 else f"{num_answers} answers"
    return f"waiting · plain decoding is measured alone, after {others} · {num_done} of {num_tokens} tokens"


def continue_label(num_done: int, num_tokens: int) -> str:
    return f"Continue measuring plain decoding ({num_done} of {num_tokens} tokens so far)"


def measuring(num_done: int, num_tokens: int) -> str:
    return f"measuring plain decoding for comparison · {num_done} of {num_tokens} tokens"


def meter(num_tokens: int, context: int, num_dropped: int) -> dict[str, Any]:
    """What the context meter shows: its text, its filled share from 0 to 1, what was left out, and the rule behind it."""
    return {"text": f"{num_tokens:,} of {context:,} tokens", "share": min(1.0, num_tokens / context), "dropped": dropped(num_dropped),
            "rule": CONTEXT_RULE}


def meter_told(num_tokens: int, context: int | None) -> dict[str, Any]:
    """The same with a server's own count of the last prompt; where its context is unknown the text stands alone, with no share."""
    of = f" of {context:,}" if context else ""
    return {"text": f"last prompt: {num_tokens:,}{of} tokens", "share": min(1.0, num_tokens / context) if context else None, "dropped": "",
            "rule": TOLD_RULE}


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
    if reason_why := withheld(stats):
        words.append(f"– × plain decoding: {reason_why}")
    elif (speed_up := stats.get("speed_up")) is not None:
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
    return f'<div class="page-status" role="status" aria-live="{spoken}" data-state="{kind}"{" data-waiting" * (state == "waiting")}>{dot}<span>{text}</span></div>'
