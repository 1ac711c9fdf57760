"""Published shapes of static trees. Each says how many children a node has, nodes being named by the ranks of the children
on the way down from the root ("-"): "-:2 0:1" is a root with two children, the better of which has one.

`eagle1`: the 25 drafted nodes of EAGLE-1's code. `medusa*`: the 63 of Medusa's (its simulated tree, then those measured on
one model each); they were built greedily, always adding the node whose path was most often right.
"""

from __future__ import annotations

PRESETS = {
    "binary": "-:2 0:2 1:2 00:2 01:2 10:2 11:2",
    "eagle1": "-:4 0:3 1:2 2:2 3:1 00:3 01:2 02:2 10:1 000:3 0000:2",
    "medusa": (
        "-:10 0:10 1:7 2:3 3:2 4:1 5:1 6:1 7:1 8:1 9:1 00:10 01:3 02:2 03:1 04:1 05:1 06:1 07:1 10:2 20:1 000:2"
    ),
    "medusa_vicuna_7b": (
        "-:10 0:10 1:5 2:2 3:2 4:1 5:1 6:1 7:1 00:9 01:4 02:2 03:1 04:1 05:1 10:3 11:1 20:1 000:4 001:1 002:1 010:1"
    ),
    "medusa_vicuna_13b": (
        "-:10 0:10 1:4 2:2 3:1 4:1 5:1 00:10 01:4 02:2 03:1 04:1 05:1 10:3 11:1 20:1 30:1 000:4 001:2 002:1 010:1 100:1"
    ),
    "medusa_vicuna_33b": (
        "-:10 0:10 1:5 2:3 3:2 4:1 5:1 6:1 7:1 00:10 01:4 02:2 03:1 04:1 05:1 10:3 11:1 20:1 000:3 001:1 010:1"
    ),
    "medusa_zephyr": "-:10 0:10 1:6 2:4 3:2 4:2 5:1 6:1 7:1 00:10 01:4 02:2 03:1 04:1 05:1 10:2 11:1 20:1 000:2 001:1",
}


def parents_of(preset: str) -> list[int]:
    """-> parent pointers in breadth-first order, root first, siblings by rank."""
    count = {node.strip("-"): int(children) for node, children in (item.split(":") for item in preset.split())}
    order = [""]
    for node in order:  # grows while it is read
        order += [f"{node}{rank}" for rank in range(count.pop(node, 0))]
    assert not count, f"children of nodes that do not exist: {count}"
    return [-1] + [order.index(node[:-1]) for node in order[1:]]
