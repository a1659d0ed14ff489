"""The constraint ``structural``: an answer of several parts (``protocol.structure``).

``free_masks`` has the masks of text in which parts may begin or end. ``structural_controller``
follows one sequence through its parts, and applies the constraint ``json_schema`` to parts with a
schema.
"""
