"""Model families as pure functions over stacked parameter trees."""
