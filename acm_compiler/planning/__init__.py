"""Planning: decisions for every site, what they cost, and the plan that holds them."""
