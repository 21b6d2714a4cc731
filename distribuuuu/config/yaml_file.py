"""YAML with limits on its length, its depth and the number of its nodes.

A few lines of nested aliases can expand to billions of values, and deep nesting exhausts the stack.
"""

from typing import Any

import yaml

MAX_CHARACTERS, MAX_NODES, MAX_DEPTH = 1 << 17, 5_000, 50


def compose(text: str) -> yaml.Node | None:
    """Return the root node of a text, None if it is empty.

    Raises:
        yaml.YAMLError: the text is not YAML, or exceeds a limit with its aliases expanded.
    """
    if len(text) > MAX_CHARACTERS:
        raise yaml.YAMLError(f"has more than {MAX_CHARACTERS} characters")
    loader = _BoundedLoader(text)
    try:
        root = loader.get_single_node()
    finally:
        loader.dispose()
    waiting, num_nodes = [(root, 1)] if root else [], 0
    while waiting:
        node, depth = waiting.pop()
        num_nodes += 1
        _check_limits(num_nodes, depth)
        if isinstance(node, yaml.CollectionNode):
            pairs = node.value if isinstance(node, yaml.MappingNode) else [(item,) for item in node.value]
            waiting += [(child, depth + 1) for pair in pairs for child in pair]
    return root


def construct(node: yaml.Node) -> Any:
    """Return the value of a node.

    Raises:
        yaml.YAMLError: it has none.
    """
    try:
        return yaml.SafeLoader("").construct_object(node, deep=True)
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:  # e.g. of `!!bool 3`
        raise yaml.YAMLError(f"{node.tag.rpartition(':')[2]} {error}") from error


def load(text: str) -> Any:
    """Return the value of a text; raises as `compose` and `construct`."""
    root = compose(text)
    return None if root is None else construct(root)


class _BoundedLoader(yaml.SafeLoader):
    """A loader that stops as soon as a limit is exceeded."""

    def __init__(self, text: str):
        super().__init__(text)
        self._num_nodes = self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Return the next node."""
        self._num_nodes, self._depth = self._num_nodes + 1, self._depth + 1
        _check_limits(self._num_nodes, self._depth)
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


def _check_limits(num_nodes: int, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise yaml.YAMLError(f"is nested deeper than {MAX_DEPTH} levels, or an alias refers to its own parent")
    if num_nodes > MAX_NODES:
        raise yaml.YAMLError(f"has more than {MAX_NODES} values with its aliases expanded")
