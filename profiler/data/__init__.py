"""Tables with their sources: datasheets, links, prices, published results, GPU profiles."""
