"""The dictionary."""

from heapq import nsmallest

from autocomplete.node import Node


class Trie:
    """Words with weights, found by their beginnings."""

    def __init__(self, words=()):
        self._root = Node()
        self._size = 0
        for word, weight in dict(words).items():
            self.add(word, weight)

    def _find(self, prefix):
        node = self._root
        for letter in prefix:
            node = node.children.get(letter)
            if node is None:
                return None
        return node

    def add(self, word, weight=1):
        """Add a word, or change its weight."""
        if not word:
            raise ValueError("the empty word has no place here")
        node = self._root
        for letter in word:
            node = node.children.setdefault(letter, Node())
        self._size += node.weight is None
        node.weight = weight

    def use(self, word):
        """Add one to the word's weight."""
        self.add(word, (self.weight(word) or 0) + 1)

    def weight(self, word):
        """The weight of a word, None if there is no such word."""
        node = self._find(word)
        return None if node is None else node.weight

    def remove(self, word):
        """Take a word out; raises KeyError when it is none."""
        if self.weight(word) is None:
            raise KeyError(word)
        path = [self._root]
        for letter in word:
            path.append(path[-1].children[letter])
        path[-1].weight = None
        self._size -= 1
        for parent, letter in zip(reversed(path[:-1]), reversed(word)):
            if parent.children[letter].children:
                break
            del parent.children[letter]

    def complete(self, prefix, limit=10):
        """The words that start with the prefix, largest weight first, then by the alphabet."""
        node = self._find(prefix)
        found = node.words(prefix) if node else ()
        return [word for word, _ in nsmallest(limit, found, key=lambda pair: (-pair[1], pair[0]))]

    def items(self):
        """All words with their weights, by the alphabet."""
        return sorted(self._root.words(""))

    def node_count(self):
        """How many nodes there are, the root not counted."""
        return self._root.count() - 1

    def __contains__(self, word):
        return self.weight(word) is not None

    def __len__(self):
        return self._size
