"""Recipes: what a user decides about one conversion, read from YAML and checked with places.

`schema` holds every key and every default; `load_recipe` is the way in.
"""

from acm_compiler.recipe.load import expand_paths as expand_paths
from acm_compiler.recipe.load import how_to_set as how_to_set
from acm_compiler.recipe.load import load_recipe as load_recipe
from acm_compiler.recipe.load import shipped_recipe as shipped_recipe
from acm_compiler.recipe.load import shipped_recipes as shipped_recipes
from acm_compiler.recipe.load import unset_variables as unset_variables
from acm_compiler.recipe.models import InputConfig as InputConfig
from acm_compiler.recipe.models import ModelConfig as ModelConfig
from acm_compiler.recipe.resolved import decisions as decisions
from acm_compiler.recipe.resolved import differences as differences
from acm_compiler.recipe.resolved import first_differences as first_differences
from acm_compiler.recipe.resolved import recipe_hash as recipe_hash
from acm_compiler.recipe.resolved import resolved_yaml as resolved_yaml
from acm_compiler.recipe.schema import Recipe as Recipe
