"""Rewrites a parsed template so that its cost can be counted while it runs.

Every body of statements begins with a call that counts a run through it, joined values and new containers are
measured, and so are the sides of comparisons. The calls are filters whose names no template can spell.
"""

from __future__ import annotations

from typing import Final

from jinja2 import nodes
from jinja2.visitor import NodeTransformer

ENTER: Final = "%enter"
CHECK: Final = "%check"
CONCATENATE: Final = "%concatenate"


def instrument(template: nodes.Template) -> None:
    """Put the counting calls into `template`, in place."""
    _Measures().visit(template)
    _count_runs(template)


def _count_runs(node: nodes.Node) -> None:
    for name in ("body", "else_"):
        statements: list[nodes.Node] = getattr(node, name, None) or []
        for statement in statements:
            _count_runs(statement)
        if statements or isinstance(node, nodes.For):
            setattr(node, name, [_counting(node, statements), *statements])
    for branch in getattr(node, "elif_", ()):
        _count_runs(branch)


def _counting(where: nodes.Node, statements: list[nodes.Node]) -> nodes.ExprStmt:
    outputs = [part for statement in statements if isinstance(statement, nodes.Output) for part in statement.nodes]
    characters = sum(len(part.data) for part in outputs if isinstance(part, nodes.TemplateData))
    return nodes.ExprStmt(_call(nodes.Const(characters, lineno=where.lineno), ENTER), lineno=where.lineno)


def _call(value: nodes.Expr, name: str) -> nodes.Filter:
    return nodes.Filter(value, name, [], [], None, None, lineno=value.lineno)


class _Measures(NodeTransformer):
    """Measures what can grow: joined values, containers, and both sides of a comparison."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802 - names of node classes
        self.generic_visit(node)
        return _call(nodes.List(node.nodes, lineno=node.lineno), CONCATENATE)

    def visit_List(self, node: nodes.List) -> nodes.Node:  # noqa: N802
        return self._measured_container(node)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:  # noqa: N802
        return self._measured_container(node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:  # noqa: N802
        if node.ctx != "load":
            return node
        return self._measured_container(node)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.expr = _measured(node.expr)
        for operand in node.ops:
            operand.expr = _measured(operand.expr)
        return node

    def _measured_container(self, node: nodes.Expr) -> nodes.Node:
        constant = all(isinstance(child, nodes.Const) for child in node.iter_child_nodes())
        self.generic_visit(node)
        return node if constant else _call(node, CHECK)


def _measured(value: nodes.Expr) -> nodes.Expr:
    return value if isinstance(value, nodes.Const) else _call(value, CHECK)
