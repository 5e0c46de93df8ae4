class TemplateError(ValueError):
    """A mistake in a template, or in the values for it."""

    def __init__(self, message, template, line):
        super().__init__(f"{template}, line {line}: {message}")
        self.template = template
        self.line = line
