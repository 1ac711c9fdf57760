"""Which parts may be combined. Everything that would bias the output is refused here, before anything runs."""

from __future__ import annotations

from specresearch.types import LAWS, Drafter, Law, TreePolicy, UserError, Verifier

ADVICE = "use verifier=rejection, which has an exact rule for every tree"


def check_fit(drafter: Drafter, policy: TreePolicy, verifier: Verifier, temperature: float, lossy: str) -> None:
    """Raises UserError, naming a combination that works."""
    name = name_of(verifier)
    if lossy not in ("refuse", "allow"):
        raise UserError(f"lossy={lossy} is unknown: use lossy=refuse or lossy=allow")
    if drafter.simulated and temperature > 0:
        raise UserError(
            f"drafter=simulated knows the one answer of temperature 0, and temperature={temperature}: use 0"
        )
    if drafter.simulated and policy.temperature is not None:
        raise UserError(
            "drafter=simulated puts its tokens where they must stand: use tree.draw=topk, so that none is drawn"
        )
    if verifier.greedy_only and temperature > 0:
        raise UserError(f"verifier={name} is right at temperature 0 only, and temperature={temperature}: {ADVICE}")
    if verifier.lossy and lossy != "allow":
        raise UserError(f"verifier={name} is lossy ({verifier.lossy}): say lossy=allow if that is wanted, or {ADVICE}")
    law, growth = drafter.law or policy.law, drafter.growth or policy.growth
    if growth == "pruned_after_reveal" and law != "point":
        raise UserError(f"{type(policy).__name__} prunes after the draw, so its law must be point, not {law}")
    if verifier.chain_only and policy.width > 1:
        raise UserError(f"verifier={name} verifies chains only: use tree=chain, or {ADVICE}")
    if not laws_of(law, policy.width) & verifier.laws:
        reason = f"verifier={name} would bias a tree whose children are chosen by the law {law}"
        raise UserError(f"{reason}: {draws_for(verifier)}, or {ADVICE}")
    if growth not in verifier.growths:
        raise UserError(
            f"verifier={name} would bias a tree that grows in the way {growth}: {trees_for(verifier)}, or {ADVICE}"
        )


def name_of(verifier: Verifier) -> str:
    """As on the command line: one rule, one file."""
    return type(verifier).__module__.rpartition(".")[2]


def laws_of(law: Law, width: int) -> set[Law]:
    """On a chain, draws with and without replacement are the same."""
    return set(LAWS[1:]) if width == 1 and law != "point" else {law}


def draws_for(verifier: Verifier) -> str:
    """What would give the verifier a law that it is lossless for."""
    if "point" in verifier.laws:
        return "use tree.draw=topk"
    law = "iid" if "iid" in verifier.laws else "without_replacement"
    return f"use a drafter that is asked for its law, temperature above 0 and {trees_for(verifier)[4:]} tree.draw={law}"


def trees_for(verifier: Verifier) -> str:
    return "use tree=chain" if verifier.chain_only else "use tree=static"
