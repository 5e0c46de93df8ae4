"""A binary tree of intervals by start and end."""


class Node:
    """An interval with all its values, in the order in which they were added."""

    __slots__ = ("end", "left", "right", "start", "values")

    def __init__(self, start, end, value):
        self.start = start
        self.end = end
        self.values = [value]
        self.left = None
        self.right = None

    def is_before(self, start, end):
        """Whether this interval is ordered before another one."""
        return self.start < start or (self.start == start and self.end < end)


def insert(node, start, end, value):
    """Add a value below a node; return the node that takes its place."""
    if node is None:
        return Node(start, end, value)
    if node.start == start and node.end == end:
        node.values.append(value)
    elif node.is_before(start, end):
        node.right = insert(node.right, start, end, value)
    else:
        node.left = insert(node.left, start, end, value)
    return node


def remove(node, start, end, value):
    """Remove a value below a node; return the node that takes its place, None if nothing is left."""
    if node is None:
        raise KeyError((start, end, value))
    if node.start == start and node.end == end:
        if value not in node.values:
            raise KeyError((start, end, value))
        node.values.remove(value)
        return node if node.values else join(node.left, node.right)
    if node.is_before(start, end):
        node.right = remove(node.right, start, end, value)
    else:
        node.left = remove(node.left, start, end, value)
    return node


def join(left, right):
    """One tree of two, of which the left one is before the right one."""
    if left is None:
        return right
    left.right = join(left.right, right)
    return left


def overlapping(node, start, end):
    """The nodes that share a point with start <= point < end, in order."""
    if node is not None:
        yield from overlapping(node.left, start, end)
        if node.start < end and start < node.end:
            yield node
        yield from overlapping(node.right, start, end)


def containing(node, point):
    """The nodes that contain the point, in order."""
    if node is not None:
        yield from containing(node.left, point)
        if node.start <= point < node.end:
            yield node
        yield from containing(node.right, point)


def in_order(node):
    """All nodes."""
    if node is not None:
        yield from in_order(node.left)
        yield node
        yield from in_order(node.right)
