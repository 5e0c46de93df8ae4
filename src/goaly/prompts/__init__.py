"""Stage 1: prompt sources, and the tokenizer that renders chats."""
