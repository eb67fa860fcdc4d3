"""Linear layers of one input made one call, in an exported graph."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

from reblock.backends.torch.native import ops

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

__all__ = ["group_linears"]


def group_linears(graph_module: GraphModule) -> None:
    """Replace the `linear` calls that share their x by one call of `linears`, in place.

    Queries, keys and values of a layer are such calls, and so are the two halves of a gated MLP.
    Each result has the bits that it had. What nothing uses is removed first.
    """
    graph = graph_module.graph
    graph.eliminate_dead_code()
    groups: dict[tuple[Node, object], list[Node]] = {}
    for node in graph.nodes:
        if node.op == "call_function" and node.target is ops.linear and _is_movable(node):
            x, packed = node.args[:2]
            groups.setdefault((x, packed.meta["val"].dtype), []).append(node)
    for nodes in groups.values():
        if len(nodes) > 1:
            _group(nodes)
    graph.lint()
    graph_module.recompile()


def _is_movable(node: Node) -> bool:
    """Return whether all but x are inputs of the graph, and so are there for an earlier call."""
    x = node.args[0]
    return all(each is x or each.op == "placeholder" for each in node.all_input_nodes)


def _group(nodes: list[Node]) -> None:
    first = nodes[0]
    graph = first.graph
    x = first.args[0]
    rest = [list(column) for column in zip(*(node.args[1:] for node in nodes), strict=True)]
    with graph.inserting_before(first):
        together = graph.call_function(ops.linears, (x, *rest))
        together.meta["val"] = [node.meta["val"] for node in nodes]
        for index, node in enumerate(nodes):
            result = graph.call_function(operator.getitem, (together, index))
            result.meta = node.meta
            node.replace_all_uses_with(result)
    for node in nodes:
        graph.erase_node(node)
