"""The forward pass over paged KV: begin at ``step.py`` (the interface) and ``loader.py``."""
