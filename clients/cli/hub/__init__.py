"""The commands ``tokenbus pull``, ``models`` and ``rm``: models of a hub in the cache of
huggingface_hub."""
