r"""The verifier of maths problems: is the last answer in a response equal to the prompt's answer? Uses math-verify.

An answer is `\boxed{...}`, what follows "Answer:" or "the answer is", what follows `####`, or a response of one line.
Where there are several, the last one counts that begins with maths. Prose, as in "the answer is unique", is an answer
only if there is no other. Text inside `<think>` is none. `verify` does not see a `<think>` that the chat template
opens, so it takes a box in unfinished thinking for the answer; use `verify_after_thinking` with such a template.

One answer of a response is compared: a response that lists several candidates gains nothing. A response can't raise:
what can't be read is wrong. A prompt without a readable answer raises.
"""

import logging
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from latex2sympy2_extended.math_normalization import NormalizationConfig
from latex2sympy2_extended.sets import FiniteSet as WrittenSet
from math_verify import LatexExtractionConfig, parse
from math_verify import verify as compare
from math_verify.errors import TimeoutException
from sympy import Expr, FiniteSet, Interval, Tuple

from goaly.prompts.prompt import Prompt

MAX_ANSWER_CHARACTERS = 400
"""A longer answer is wrong: nobody means it, and it may take minutes to simplify."""
LOOK_CHARACTERS = 2 * MAX_ANSWER_CHARACTERS
"""Characters after its marker in which an answer is searched."""
PARSE_SECONDS = COMPARE_SECONDS = 2
"""Limits for sympy. `reward.time_limit_seconds` ends what ignores signals, such as a power of huge integers."""
RELATIVE_TOLERANCE = 2e-6
"""Decimals that differ by less are equal: 0.333333 is 1/3, 0.3333 is not."""
ROUNDED_TOLERANCE = 1e-2
"""The sides of `\\approx` differ by less."""

_LATEX = (LatexExtractionConfig(normalization_config=NormalizationConfig(malformed_operators=True, nits=True)),)
_FUNCTIONS = "sin|cos|tan|log|ln|exp|sqrt|pi|inf|infty|infinity"
_LEAD = (
    r"(?:[\s*_:,]*\b(?:actually|indeed|exactly|simply|just|therefore|thus|hence|then"
    r"|there (?:are|is)|it is|we (?:get|have))\b)*"
)
"""Words before an answer that say nothing."""
_MARKER = re.compile(
    r"(?P<doubt>\b(?:if|whether|check(?:ing)?|verify(?:ing)?)\s+(?:the|our|my|this)\s+(?:final\s+)?)?"
    rf"\banswer\b[*_]*\s*(?:is\b\s*:?|[:\uff1a=])[*_]*{_LEAD}|答案(?:是|为)?\s*[:\uff1a]?"
    r"|^####(?! *\d+[.)] +\S)",  # not the heading `#### 2. Check`
    re.IGNORECASE | re.MULTILINE,
)
_PROSE = re.compile(
    rf"[\s*_:(\"“]*(?:[<>]|(?!(?:{_FUNCTIONS})\b|not\s+[^a-z])(?:[^\W\d_]{{2}}|[^\W\d_]\s+[^\W\d_]))", re.IGNORECASE
)
"""How a remark on the answer begins; an answer is a number, a letter, a function or a command."""
_BRACE = re.compile(r"\\(?:boxed|fbox)\s*\{|\\[{}]|[{}]")
_DISPLAY = re.compile(r"\s*(?:\$\$(.*?)\$\$|\\\[(.*?)\\\])", re.DOTALL)
_INLINE = re.compile(r"(?<!\\)\$([^$]+)(?<!\\)\$|\\\((.*?)\\\)")
_BETWEEN = re.compile(r"\s*(?:,|;|,?\s*and|,?\s*or)\s*")
_CLAUSE = re.compile(
    r"[.;]\s|\s*\u2014|,? (?:because|since|which|where|as) |, so "
    rf"|(?<=[\d)\]}}%*!]), (?!(?:{_FUNCTIONS}|and|or)\b)[a-z]{{2,}}\b(?!\s*=)"
    rf"| \((?!or\b|mod\b)(?=[^()]*\b(?!(?:{_FUNCTIONS})\b)[a-z]{{3}})",
    re.IGNORECASE,
)
"""The beginning of an explanation of the answer before it."""
_POWERS = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_SCALES = "|".join(_POWERS)
_NO_UNIT = re.compile(
    rf"\b(?:{_FUNCTIONS}|alpha|beta|theta|and|or|nor|not|but|to|than|if|when|unless|except|is|are|was|maybe|perhaps|at"
    r"|more|less|fewer|most|least|up|above|below|plus|minus|times|over|divided|squared|cubed|factorial|choose|mod|modulo"
    rf"|base|percent|percentage|pct|half|halves|thirds|quarters|dozen|hundred|(?:{_SCALES})s?)\b",
    re.IGNORECASE,
)
"""Words after a number that make it another one, or no answer."""
_GOES_ON = re.compile(rf"[ ,$]*(?:(?:or|{_SCALES})\b|(?:and|to|plus|minus|times|over)\s+\W*\d)")
"""How a line goes on where the maths before is not the whole answer."""
_WORDS = re.compile(r"[^\W\d_](?:[^\d_\\{}^$=+*/<>|()\[\]-]|(?<=[^\W\d_])-(?=[^\W\d_]{2}))*")
_TEXT = re.compile(r"\\(?:text|textbf|textit|mathrm|mbox|mathbf)\s*\{([^{}]*)\}")
_UNIT = re.compile(
    r"\s*(?:\\[ ,;])*(?:\\(?:text|mathrm|mbox)\s*\{\s*([^{}\d]+?)\s*\}"
    r"|(?<=\d)((?:[ckm]m|[km]g|ml|ft)\b)"
    r"|(?:(?<=[\d})%])|(?<=\\pi))\s+([a-z]{3}[a-z'/ -]*|[ckm]m|[km]g|ml|ft|in|lb|oz|hr|[mgslh]))(?:\s*\^\{?\d\}?)?$",
    re.IGNORECASE,
)
_NUMBER = re.compile(r"[+-]?\d+")
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
_APPROXIMATES = re.compile(r"\s*(?:\\approx|\\simeq|≈)\s*")
_NAME = re.compile(r"[a-zA-Z]?")
_DROPPED = re.compile(r"\\[lcd]?dots\b|(?<=\d)\s*_\W*(?:text\W*)?(\w+)")
"""Dots and the base of a numeral: math-verify reads an answer as if they were not there."""


def _repeating(found: re.Match[str]) -> str:
    fixed, period = found[1] + found[2], found[3]
    whole = int(fixed + period) - int(fixed or "0")
    return rf"\frac{{{whole}}}{{{'9' * len(period) + '0' * len(found[2])}}}"


_PLAIN = (
    (re.compile(r"[\u2212\u2013]"), "-"),
    (re.compile(r"°"), r"^\\circ "),
    (re.compile(r"\\!"), ""),
    (re.compile(r"\\[,;:>]|\\quad|~|&nbsp;|[\u00a0\u2009\u202f]"), " "),
    (re.compile(r"\\(?:text|mathrm|mbox)\s*\{\s*([\d.,]+|i)\s*\}"), r"\1"),
    (
        re.compile(rf"(?<=\d)\s*(?:\\text\s*\{{\s*({_SCALES})\s*\}}|({_SCALES})\b)"),
        lambda found: rf"\cdot 10^{{{_POWERS[found[1] or found[2]]}}}",
    ),
    (re.compile(r"(?<![\d.])(\d*)\.(\d*)\\(?:overline|bar)\s*\{(\d+)\}"), _repeating),
    (re.compile(r"(?<![\d.])\.(?=\d)"), "0."),
    (re.compile(r"\\([dt]?frac\s*(?=\d\s)|log_\s*)(\d+)\s+(?=\d)"), r"\\\1{\2}"),
    (re.compile(r"(?<=\d)\{,\}(?=\d{3}(?!\d))"), ","),
    (re.compile(r"(?<![\d.,])(\d{1,3}(?: \d{3})+)(?![\d.]*\d)"), lambda found: found[0].replace(" ", "")),
    (re.compile(r"(?<![\d.])(\d+) (\d+)/(\d+)(?![\d.])"), r"\1\\frac{\2}{\3}"),
    (re.compile(r"(?<=\d)[eE]([+-]?\d+)\b"), r"\\cdot 10^{\1}"),
    (re.compile(r"√\s*(\d+)"), r"\\sqrt{\1}"),
    (re.compile(r"π|(?<![\\a-zA-Z])pi(?![a-zA-Z])"), r"\\pi "),
    (re.compile(r"∞|(?<![\\a-zA-Z])inf(?:inity)?(?![a-zA-Z])"), r"\\infty "),
    (re.compile(r"\u222a|(?<=[\])])\s*U\s*(?=[(\[])"), r"\\cup "),
    (re.compile(r"\u00d7"), r"\\times "),
    (re.compile(r"≤|<="), r"\\le "),
    (re.compile(r"≥|>="), r"\\ge "),
    (re.compile(r"\*\*"), "^"),
)
"""How people write without LaTeX, and what it is in LaTeX."""

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns at each answer, as its own time limit is not used


def verify(prompt: Prompt, response: str) -> float:
    """1 if the response's last answer equals the prompt's, else 0."""
    if not prompt.answer or not prompt.answer.strip():
        raise ValueError(f"answer={prompt.answer!r}: a maths problem must have one")
    expected = _clean(_marked(prompt.answer) or prompt.answer)
    if not _is_text(expected) and not _parsed(_without_unit(expected)[0]):
        raise ValueError(f"answer={prompt.answer!r}: must be a number, an expression in LaTeX, or words")
    answer = extract(response)
    if answer is None or len(answer) > LOOK_CHARACTERS:
        return 0.0
    return float(equal(expected, _clean(answer)))


def verify_after_thinking(prompt: Prompt, response: str) -> float:
    """As `verify`, for a model whose chat template opens `<think>`: 0 for a response that does not close it.

    Not for chats with `chat.reasoning_parser`, of which a verifier gets the answer without its thinking."""
    return verify(prompt, response if "</think>" in response else "")


def extract(response: str) -> str | None:
    """The last answer of a response as it is written; None if there is none."""
    response = response.rpartition("</think>")[2].strip()
    if "<think>" in response:
        return None  # cut off while it was thinking
    if (marked := _marked(response)) is not None:
        return marked
    return _said(response) if "\n" not in response and len(response) <= LOOK_CHARACTERS else None


def equal(expected: str, answer: str) -> bool:
    """Whether two answers, without delimiters of maths, are the same words or equal as expressions."""
    if not answer or len(answer) > MAX_ANSWER_CHARACTERS:
        return False
    if expected == answer:
        return True
    if _NUMBER.fullmatch(expected) and _NUMBER.fullmatch(answer):
        return int(expected) == int(answer)
    if _is_text(expected):
        return _words(expected) == _words(answer)
    if not _dropped(answer) <= _dropped(expected):
        return False
    (expected, unit), (answer, other) = _without_unit(expected), _without_unit(answer)
    if unit and other and unit != other:
        return False
    if (sides := _APPROXIMATES.split(answer))[1:]:  # `x \approx 3`, `\sqrt{2} \approx 1.41`: the first number counts
        exact, *rounded = [side for side in sides if not _NAME.fullmatch(side)] or [""]
        return equal(expected, exact) and all(_agree(exact, side) for side in rounded)
    if "=" not in expected and (parts := _sides(answer))[1:]:  # `x = 1 + 1 = 2`: numbers in the chain must agree
        return all(
            equal(parts[-1], part) for part in parts[:-1] if not re.search(r"(?<!\\)\b[a-zA-Z]", part)
        ) and equal(expected, parts[-1])
    wanted, given = _parsed(expected), _parsed(answer)
    if not wanted or not given or not _same_kind(wanted[0], given[0], answer):
        return False
    return _in_time(
        lambda: (
            compare(wanted, given, allow_set_relation_comp=True, timeout_seconds=None) and _close(wanted[0], given[0])
        )
    )


def _in_time(judge: Callable[[], bool]) -> bool:
    """Its result, or False after `COMPARE_SECONDS`."""
    try:
        with _limited(COMPARE_SECONDS):
            return judge()
    except TimeoutException:
        return False


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Raise TimeoutException after so long, and again each time as long after. Math-verify's own limit raises it once,
    and it is lost if Python collects garbage just then."""

    def too_long(*_: object) -> None:
        raise TimeoutException

    before = signal.signal(signal.SIGALRM, too_long)
    signal.setitimer(signal.ITIMER_REAL, seconds, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _marked(response: str) -> str | None:
    """The last answer in a box or after another marker, as it is written."""
    start, end = _last_box(response)
    prose, until = None, len(response)
    for marker in reversed(list(_MARKER.finditer(response, end))):
        piece = response[marker.end() : min(until, marker.end() + LOOK_CHARACTERS)]
        until = marker.start()
        said = None if marker["doubt"] else _said(piece)
        if said and not _PROSE.match(piece):
            return said
        prose = prose or said
    return response[start:end] if end else prose


def _last_box(text: str) -> tuple[int, int]:
    """The first character in the last box that is closed, and its closing brace; zeros if there is none."""
    opened: list[re.Match[str]] = []
    last = 0, 0
    for found in _BRACE.finditer(text):
        if found[0] == "}" and opened:
            opening = opened.pop()
            if opening[0] != "{" and opening.end() > last[0]:
                last = opening.end(), found.start()
        elif found[0] not in ("}", "\\{", "\\}"):
            opened.append(found)
    return last


def _said(text: str) -> str | None:
    """The answer at the beginning of a text, without an explanation after it."""
    if (display := _DISPLAY.match(text)) and not _GOES_ON.match(text, display.end()):
        return display[1] or display[2]
    line = next((line.strip() for line in text.splitlines() if line.strip(" *_:")), "")
    phrase = _CLAUSE.split(line, maxsplit=1)[0]
    first = _INLINE.search(line)
    if first is None or first.start() >= len(phrase):
        return phrase or None
    found, end = [first[1] or first[2]], first.end()
    for more in _INLINE.finditer(line, end):  # `$1$ and $2$` are one answer
        if not _BETWEEN.fullmatch(line[end : more.start()]):
            break
        found.append(more[1] or more[2])
        end = more.end()
    alone = not re.search(r"\d|\bnot\b", line[: first.start()]) and not _GOES_ON.match(line, end)
    return ", ".join(found) if alone else phrase


def _clean(answer: str) -> str:
    """The answer without delimiters, emphasis and final punctuation, in LaTeX."""
    answer = re.sub(r"(?<!\\)\$|\\[()\[\]](?![a-zA-Z])|\\(?:left|right)\b|\\displaystyle", "", answer)
    answer = answer.rstrip(" *_.\n").lstrip(" *_\n")
    for pattern, latex in _PLAIN:
        answer = pattern.sub(latex, answer)
    if not re.search(r"[(\[{]", _TEXT.sub("", answer)):  # in `(100,200)` the comma separates
        answer = _THOUSANDS.sub(lambda found: found[0].replace(",", ""), answer)
    return " ".join(answer.split()).rstrip(" .,;:*_").lstrip(" ,;:*_")


def _is_text(answer: str) -> bool:
    """Whether an answer is a word, of which letters may not change places as in a product."""
    plain = _TEXT.sub(r"\1", answer).strip(" ().")
    return (
        bool(_WORDS.fullmatch(plain))
        and len(plain) > 2
        and plain.casefold() not in _FUNCTIONS.split("|")
        and "," not in plain
    )


def _words(answer: str) -> str:
    return " ".join(_TEXT.sub(r"\1", answer).casefold().strip(" ().").split())


def _without_unit(answer: str) -> tuple[str, str]:
    """An answer without the unit, or other words, that follow its number; and these in the singular, if any."""
    found = _UNIT.search(answer)
    unit = next(filter(None, found.groups()), "") if found else ""
    if found is None or not answer[: found.start()] or _NO_UNIT.search(unit):
        return answer, ""
    return answer[: found.start()], unit.casefold().rstrip("s.")


def _dropped(answer: str) -> set[str]:
    return {found[1] or "" for found in _DROPPED.finditer(answer)}


def _agree(exact: str, rounded: str) -> bool:
    one, other = _parsed(_sides(exact)[-1]), _parsed(rounded)
    return bool(one and other) and _in_time(lambda: _close(one[0], other[0], ROUNDED_TOLERANCE))


def _sides(answer: str) -> list[str]:
    """The sides of a chain of equations, or the answer alone if it is a list or an inequality."""
    if re.search(r"[,;<>]|\\(?:le|ge|lt|gt|ne)|\\text|\band\b|\bor\b", answer):
        return [answer]
    return [side.strip() for side in answer.split("=")]


def _parsed(answer: str) -> list[Any]:
    """The answer as sympy sees it; empty if it can't be read, or not in time."""
    try:
        return _read(answer)
    except TimeoutException:  # on a busy machine: the next time may be quicker
        return []


@lru_cache(maxsize=256)
def _read(answer: str) -> list[Any]:
    if not answer or "$" in answer.replace("\\$", "") or re.search(r"\d\s+\d", answer):  # `1 1` is no product
        return []
    own: dict[str, Any] = {"parsing_timeout": None, "raise_on_error": True}
    try:
        with _limited(PARSE_SECONDS):
            return parse(f"${answer}$", _LATEX, fallback_mode="no_fallback", **own)[:1]
    except Exception:  # no answer: math-verify raises whatever its grammar and sympy do
        return []


def _same_kind(wanted: Any, given: Any, answer: str) -> bool:
    """Whether a set in braces is compared with a set: math-verify takes it for a pair, too."""
    ordered = isinstance(wanted, Tuple) or (isinstance(wanted, Interval) and wanted.left_open and wanted.right_open)
    return not (ordered and isinstance(given, (FiniteSet, WrittenSet)) and "\\{" in answer)


def _close(wanted: Any, given: Any, tolerance: float = RELATIVE_TOLERANCE) -> bool:
    """Whether two numbers are close: math-verify rounds both to six decimals, so all tiny numbers are equal to it."""
    if not (isinstance(wanted, Expr) and isinstance(given, Expr) and wanted.is_number and given.is_number):
        return True
    try:
        one, other = complex(wanted.doit().evalf()), complex(given.doit().evalf())
    except (TypeError, ValueError, OverflowError):
        return True
    return any(abs(one - value) <= tolerance * abs(one) for value in (other, other * 100, other / 100))
