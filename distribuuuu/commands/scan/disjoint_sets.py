"""Disjoint sets of numbers that are joined step by step (union-find)."""


class DisjointSets:
    """Sets of numbers; at first, each number is in a set of its own."""

    def __init__(self) -> None:
        self._parents: dict[int, int] = {}

    def find(self, number: int) -> int:
        """Return the smallest number of a set."""
        while (parent := self._parents.get(number, number)) != number:
            self._parents[number] = self._parents.get(parent, parent)
            number = parent
        return number

    def join(self, one: int, other: int) -> None:
        """Join the sets of two numbers."""
        first, second = sorted((self.find(one), self.find(other)))
        self._parents[second] = self._parents.setdefault(first, first)

    def groups(self) -> list[list[int]]:
        """Return the sets of several numbers, each ascending, in the order of their smallest numbers."""
        members: dict[int, list[int]] = {}
        for number in sorted(self._parents):
            members.setdefault(self.find(number), []).append(number)
        return list(members.values())
