"""The JSON Schema of recipes, for editors."""

from __future__ import annotations

from typing import Any

from pydantic.json_schema import GenerateJsonSchema

from acm_compiler.recipe.fields import Every
from acm_compiler.recipe.schema import Recipe


class _Generator(GenerateJsonSchema):
    def encode_default(self, dft: Any) -> Any:
        return str(dft) if isinstance(dft, Every) else super().encode_default(dft)


def recipe_json_schema() -> dict[str, Any]:
    """A JSON Schema (2020-12) document that describes recipe files."""
    schema = Recipe.model_json_schema(schema_generator=_Generator)
    return {"$schema": _Generator.schema_dialect, **schema, "title": "acm_compiler recipe"}
