"""Which word is being spoken, from a model's attention to its text. Torch-free; knows no model."""
