"""Plans of models: which parts, in what order, of which tensors, as values that run without torch.

Imports facts of models; no backend comes in: backends learn plans, and run models by them.

Start with ``plan.py``; ``rules.py`` makes plans by a config, of the families of ``families.py``.
"""
