"""The statement."""

from dataclasses import dataclass, replace

from querysmith.names import checked


@dataclass(frozen=True)
class Join:
    """A table that is joined."""

    kind: str
    table: str
    condition: object


class Select:
    """A SELECT statement."""

    def __init__(self, table, *columns):
        self._parts = _Parts(checked(table), tuple(checked(column) for column in columns))

    def _with(self, **changes):
        query = object.__new__(Select)
        query._parts = replace(self._parts, **changes)
        return query

    def join(self, table, condition):
        """Join a table; rows without a partner are left out."""
        return self._with(joins=(*self._parts.joins, Join("JOIN", checked(table), condition)))

    def left_join(self, table, condition):
        """Join a table; rows without a partner are kept."""
        return self._with(joins=(*self._parts.joins, Join("LEFT JOIN", checked(table), condition)))

    def where(self, condition):
        """Keep the rows for which the condition holds."""
        where = condition if self._parts.where is None else self._parts.where & condition
        return self._with(where=where)

    def order_by(self, *names):
        """Sort by these columns; a `-` before the name is descending."""
        order = [f"{checked(name.removeprefix('-'))}{' DESC' if name.startswith('-') else ''}" for name in names]
        return self._with(order=(*self._parts.order, *order))

    def limit(self, count):
        """Return at most this many rows."""
        return self._with(count=count)

    def sql(self):
        """The text with placeholders, and the list of values."""
        parts, values = self._parts, []
        text = f"SELECT {', '.join(parts.columns) or '*'} FROM {parts.table}"
        if parts.where is not None:
            values += parts.where.values
        for join in parts.joins:
            text += f" {join.kind} {join.table} ON {join.condition.text}"
            values += join.condition.values
        if parts.where is not None:
            text += f" WHERE {parts.where.text}"
        if parts.order:
            text += f" ORDER BY {', '.join(parts.order)}"
        if parts.count is not None:
            text += " LIMIT ?"
            values.append(parts.count)
        return text, values


@dataclass(frozen=True)
class _Parts:
    table: str
    columns: tuple
    joins: tuple = ()
    where: object = None
    order: tuple = ()
    count: int | None = None
