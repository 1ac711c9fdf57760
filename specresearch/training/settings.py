"""What the settings of a training may be: `data.*`, `schedule.*`, `drafter.*`."""

from __future__ import annotations

from specresearch.ranges import FLAG, Rule, number, optional, several, whole

DATA = {
    **dict.fromkeys(("tokens", "rows", "turn_tokens", "answer_tokens"), whole()),
    **dict.fromkeys(("long_share", "greedy"), number(0, 1)),
    "temperatures": several(number(), "numbers of at least 0, e.g. [0.6, 1.0]"),
    "top_p": number(0, 1, above=True),
    "folder": optional(Rule(lambda v: isinstance(v, str) and bool(v), "a folder")),
}
SCHEDULE = {
    **dict.fromkeys(("epochs", "pack_tokens", "accumulate", "evaluate_steps", "evaluate_dialogues"), whole()),
    "minutes": optional(number(above=True)),
    **dict.fromkeys(("lr", "clip"), number(above=True)),
    **dict.fromkeys(("warmup", "seed"), whole(0)),
    "final": number(0, 1),
    "beta2": Rule(lambda v: number(0, 1).holds(v) and v < 1, "a number of at least 0 and below 1"),
    **dict.fromkeys(("weight_decay", "checkpoint_seconds"), number()),
}
LAYERS = several(whole(0), "the target's layers, e.g. [0, 1, 29]")
DRAFTER = {  # by key, whatever the recipe
    "steps": whole(1, 32),
    "heads": whole(1, 64),
    "layers": Rule(
        lambda v: whole(1, 64).holds(v) or LAYERS.holds(v), f"a number of blocks, for small_lm {LAYERS.instead}"
    ),
    "decay": number(above=True),
    "keep": number(0, 1, above=True),
    "draft_vocab": whole(4),  # four guesses are counted
    **dict.fromkeys(("law_weight", "noise"), number()),
    "linear_heads": whole(0),
    "taps": optional(
        several(Rule(lambda v: v == "norm" or whole(0).holds(v), ""), "blocks of the target, e.g. [2, 15, 27]")
    ),
    **dict.fromkeys(("fc_norm", "own_kv", "tied", "answers_only"), FLAG),
}
