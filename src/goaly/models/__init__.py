"""Model definitions: torchtitan models built from Hugging Face folders."""
