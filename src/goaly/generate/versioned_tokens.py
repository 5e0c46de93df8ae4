"""Tokens of an answer, each with its log-probability and the policy version of the weights that sampled it.

generate-3: A token's version is that of the weights that produced its logits: the weights change only when every
    step that was launched has been read, and its tokens are stamped with the version set before.
"""

from dataclasses import dataclass, field


@dataclass(slots=True)
class VersionedTokens:
    """Three columns of equal length."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def stamp(self, tokens: list[int], logprobs: list[float], version: int) -> None:
        """Add the tokens that one step sampled with the weights of this version (generate-3)."""
        self.tokens += tokens
        self.logprobs += logprobs
        self.versions += [version] * len(tokens)

    def extend(self, more: "VersionedTokens") -> None:
        """Add the tokens that come next."""
        self.tokens += more.tokens
        self.logprobs += more.logprobs
        self.versions += more.versions

    def since(self, start: int) -> "VersionedTokens":
        """The tokens from this place on."""
        return VersionedTokens(self.tokens[start:], self.logprobs[start:], self.versions[start:])
