"""Stage 2: sessions of agents, which record what the policy samples for them as a tree of tokens."""
