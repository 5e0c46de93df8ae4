"""Stage 1: where prompts come from, and how text becomes tokens."""
