"""Networks of transformers, bound to caches: attention, latents, recurrent modules, positions.

Imports the cache alone; no weight is read and no kernel replaces a layer here.
"""
