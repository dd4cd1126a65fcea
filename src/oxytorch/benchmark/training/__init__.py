"""Results of `examples/train_character_model.py`."""
