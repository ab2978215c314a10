"""Sources of models: references such as `torchvision:vit_b_16`, and the models built from them.

`parse_reference` in `build` reads one, `build` makes the model, `build_from_record` makes it again for a saved folder.
"""
