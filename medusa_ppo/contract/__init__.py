"""What crosses a seam: rollouts, batches, status, published heads, and the names of figures."""
