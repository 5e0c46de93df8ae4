"""Replies of environments that are broken."""

OBSERVED = '{"observation": {"text": "go on"}, "reward": %s, "done": %s, "metadata": %s}'
BROKEN = {
    "no JSON": "<html>502</html>",
    "nothing": "",
    "a list": "[1]",
    "null": "null",
    "missing fields": "{}",
    "deep": "[" * 5000,
    "a deep observation": '{"observation": ' + "[" * 100 + "]" * 100 + "}",
    "half a character": '{"observation": "\\ud800"}',
    "a reward of 10**400": OBSERVED % ("1" + "0" * 400, "false", "{}"),
    "a reward of 1e300": OBSERVED % ("1e300", "false", "{}"),
    "an infinite reward": OBSERVED % ("1e999", "false", "{}"),
    "no number": OBSERVED % ("NaN", "false", "{}"),
    "a reward that is a text": OBSERVED % ('"1"', "false", "{}"),
    "an end that is a number": OBSERVED % ("1", "1", "{}"),
    "metadata that are a list": OBSERVED % ("1", "false", "[1]"),
    "larger than may be": OBSERVED % ("1", "false", '{"a": "' + "x" * 5000 + '"}'),
}
