"""English names of whole numbers, such as 'forty-two thousand seven'."""

ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen"
).split()
TENS = ["", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
SCALES = {"billion": 10**9, "million": 10**6, "thousand": 10**3}
LIMIT = 10**12

SMALL = {word: value for value, word in enumerate(ONES)}
SMALL |= {word: 10 * value for value, word in enumerate(TENS) if word}


def _below_thousand(number):
    hundreds, rest = divmod(number, 100)
    words = [f"{ONES[hundreds]} hundred"] if hundreds else []
    if rest >= 20:
        tens, ones = divmod(rest, 10)
        words.append(TENS[tens] + (f"-{ONES[ones]}" if ones else ""))
    elif rest:
        words.append(ONES[rest])
    return " ".join(words)


def to_words(number):
    """The name of a whole number."""
    if abs(number) >= LIMIT:
        raise ValueError(f"{number} is too large")
    if number < 0:
        return "minus " + to_words(-number)
    if number == 0:
        return ONES[0]
    words = []
    for scale, value in SCALES.items():
        count, number = divmod(number, value)
        if count:
            words.append(f"{_below_thousand(count)} {scale}")
    if number:
        words.append(_below_thousand(number))
    return " ".join(words)


def from_words(text):
    """The number that the words name; 'and' and hyphens may be anywhere between words."""
    words = text.lower().replace("-", " ").split()
    if words[:1] == ["minus"]:
        return -from_words(" ".join(words[1:]))
    words = [word for word in words if word != "and"]
    if not words:
        raise ValueError("no number words")
    total = current = 0
    for word in words:
        if word in SMALL:
            current += SMALL[word]
        elif word == "hundred":
            current = max(current, 1) * 100
        elif word in SCALES:
            total = (total + max(current, 1)) * SCALES[word]
            current = 0
        else:
            raise ValueError(f"not a number word: {word!r}")
    return total + current
