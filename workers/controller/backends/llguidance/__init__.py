"""The constraints ``json_schema`` and ``lark``: llguidance's matchers, as controllers."""
