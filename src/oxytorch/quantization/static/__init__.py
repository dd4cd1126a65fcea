"""Static quantization: activations of 8 bits by ranges that calibration finds."""
