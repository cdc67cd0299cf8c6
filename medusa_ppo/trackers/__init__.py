"""Where a step's figures go beside `metrics.jsonl`: TensorBoard, Weights & Biases, trackio, Ray metrics."""
