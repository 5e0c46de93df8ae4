"""Stage 3: how good a finished sequence is, and what that says about its tokens."""
