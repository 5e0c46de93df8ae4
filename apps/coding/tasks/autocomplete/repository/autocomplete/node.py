"""Nodes of a trie."""


class Node:
    """The children by letter, and the weight of the word that ends here, if one does."""

    __slots__ = ("children", "weight")

    def __init__(self):
        self.children = {}
        self.weight = None

    def words(self, prefix):
        """All words from here on, with their weights."""
        if self.weight is not None:
            yield prefix, self.weight
        for letter, child in self.children.items():
            yield from child.words(prefix + letter)

    def count(self):
        """The number of nodes from here on."""
        return 1 + sum(child.count() for child in self.children.values())
