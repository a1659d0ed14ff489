"""The constraint ``structural``: an answer of several parts (``protocol.structure``).

``free_masks`` has the masks of text that is watched for what may begin or end there;
``structural_controller`` follows one sequence through its parts, and has their schemas followed by
the constraint ``json_schema``.
"""
