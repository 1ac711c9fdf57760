"""The fastest tree for a drafter, a target and a machine: measured once, searched with the cost model, confirmed by runs."""
