"""Stage 3: verifiers score responses, and estimators turn rewards into advantages."""
