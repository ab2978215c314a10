"""Find: the dataflow of a captured model, its sites, and reasons for what stays dense. Changes nothing."""
