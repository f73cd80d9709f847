"""Reading and driving a Hugging Face model: its blocks, masks, caches and states."""
