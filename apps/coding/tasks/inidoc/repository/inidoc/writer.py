"""From documents to text."""


def quote(value):
    """The value in quotes."""
    value = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\t", "\\t")
    return f'"{value}"'


def needs_quotes(value):
    """Whether the value would not be read back as it is."""
    return value.startswith("#") or "\t" in value


def dumps(document):
    """The text of a document, the section without a name first."""
    blocks = []
    for name, values in sorted(document.sections.items(), key=lambda section: section[0] != ""):
        lines = [f"[{name}]"] if name else []
        lines += [f"{key} = {quote(value) if needs_quotes(value) else value}".rstrip(" ") for key, value in values.items()]
        blocks.append("\n".join(lines) + "\n")
    return "\n".join(blocks)
