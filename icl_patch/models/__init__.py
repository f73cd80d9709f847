"""What is read from a Hugging Face model: its blocks, masks, caches and states."""
