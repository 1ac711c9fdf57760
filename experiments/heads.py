"""The draft heads of a target, made anew: dialogues first, then each head, in the minutes that there are.

    python experiments/heads.py [minutes=120] [tokens=150000] [heads=eagle,small_lm,medusa] [out=FOLDER] [target=... overrides]

`checkpoints/smollm2/README.md` says which commands made the heads that are shipped. An interrupted run goes on in the same
`out`; each finished head lies in `out/<name>/head`, to be used with `drafter.ckpt=` (`drafter.id=` for the small LM).
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SHARES = {"eagle": 0.6, "small_lm": 0.25, "medusa": 0.15}  # of the minutes
SETTINGS = {
    "eagle": ["drafter.keep=0.4", "schedule.lr=3e-4", "schedule.warmup=50"],
    "small_lm": ["schedule.lr=1e-3"],
    "medusa": ["schedule.lr=1e-3"],
}


def train(*overrides: str) -> None:
    """Raises SystemExit with the command's own status, 130 after Ctrl-C, if it is not 0."""
    done = subprocess.run([sys.executable, "-m", "specresearch.train", *overrides])
    if done.returncode:
        raise SystemExit(done.returncode)


def main(arguments: list[str]) -> None:
    own = {"minutes": "120", "tokens": "150000", "heads": ",".join(SHARES), "out": "runs/heads"}
    own |= dict(a.split("=", 1) for a in arguments if a.partition("=")[0] in own)
    given = [a for a in arguments if a.partition("=")[0] not in own]
    out, names = Path(own["out"]), own["heads"].split(",")
    unknown = [name for name in names if name not in SHARES]
    if unknown or not own["minutes"].replace(".", "", 1).isdigit():
        raise SystemExit(f"error: use minutes=NUMBER and heads= some of {','.join(SHARES)}")
    data = [f"data.tokens={own['tokens']}", *given]
    train("stage=data", f"hydra.run.dir={out}/data", *data)
    whole = sum(SHARES[name] for name in names)
    for name in names:
        folder = out / name
        if (folder / "checkpoint.pt").exists():
            train(f"resume={folder}")
            continue
        minutes = float(own["minutes"]) * SHARES[name] / whole
        train(*data, f"drafter={name}", f"schedule.minutes={minutes:g}", *SETTINGS[name], f"hydra.run.dir={folder}")
    print("\n".join(f"{name}: {out}/{name}/head" for name in names))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except KeyboardInterrupt:
        sys.exit(130)
