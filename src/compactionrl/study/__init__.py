"""The paper's comparisons in kind: variants times seeds, each cell an ordinary training run, and a report of them."""
