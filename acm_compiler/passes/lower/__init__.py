"""Lower: the backend's passes on the graphs that Dynamo hands it. `before` and `after` stand in each docstring."""
