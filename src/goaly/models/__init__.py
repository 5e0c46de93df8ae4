"""Model definitions: torchtitan's, built from a Hugging Face folder."""
