"""YAML with the numbers of YAML 1.2, and limits on its length, its depth and the number of its nodes.

PyYAML reads 1e-4 as text, 010 as 8 and 1:30 as 90. A few lines of nested aliases can expand to billions of values, and
deep nesting exhausts the stack.
"""

import re
from typing import Any

import yaml

_INT, _FLOAT = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"
_NUMBERS = {
    _INT: re.compile(r"[-+]?(0x[0-9a-fA-F_]+|0o[0-7_]+|0b[01_]+|[0-9][0-9_]*)$"),
    _FLOAT: re.compile(
        r"[-+]?([0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)([eE][-+]?[0-9]+)?$|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$"
    ),
}
MAX_CHARACTERS, MAX_NODES, MAX_DEPTH = 1 << 17, 5_000, 50


def compose(text: str) -> yaml.Node | None:
    """Return the root node of a text, None if it is empty; raise YAMLError if it is not YAML or exceeds a limit."""
    if len(text) > MAX_CHARACTERS:
        raise yaml.YAMLError(f"has more than {MAX_CHARACTERS} characters")
    too_deep = yaml.YAMLError(f"is nested deeper than {MAX_DEPTH} levels, or an alias refers to its own parent")
    try:
        root = _Loader(text).get_single_node()
    except RecursionError:
        raise too_deep from None
    waiting, num_nodes = [(root, 1)] if root else [], 0
    while waiting:
        node, depth = waiting.pop()
        num_nodes += 1
        if depth > MAX_DEPTH:
            raise too_deep
        if num_nodes > MAX_NODES:
            raise yaml.YAMLError(f"has more than {MAX_NODES} values with its aliases expanded")
        if isinstance(node, yaml.CollectionNode):
            pairs = node.value if isinstance(node, yaml.MappingNode) else [(item,) for item in node.value]
            waiting += [(child, depth + 1) for pair in pairs for child in pair]
    return root


def construct(node: yaml.Node) -> Any:
    """Return the value of a node; raise YAMLError if it has none."""
    try:
        return _Loader("").construct_object(node, deep=True)
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:  # e.g. of `!!bool 3`
        raise yaml.YAMLError(f"{node.tag.rpartition(':')[2]} {error}") from error


def load(text: str) -> Any:
    """Return the value of a text; raises as `compose` and `construct`."""
    root = compose(text)
    return None if root is None else construct(root)


class _Loader(yaml.SafeLoader):
    """A loader that reads numbers as YAML 1.2 does."""

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in (_INT, _FLOAT)]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_decimal(self, node: Any) -> int:
        """Return an integer; leading zeros have no meaning."""
        text = self.construct_scalar(node).replace("_", "")
        return int(text, 0 if re.match("[-+]?0[xob]", text) else 10)


_Loader.add_constructor(_INT, _Loader.construct_decimal)
for _tag, _pattern in _NUMBERS.items():
    _Loader.add_implicit_resolver(_tag, _pattern, list("-+.0123456789"))
    # Texts that are read as numbers are written in quotes.
    yaml.SafeDumper.add_implicit_resolver(_tag, _pattern, list("-+.0123456789"))
