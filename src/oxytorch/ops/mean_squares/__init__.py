"""Means of squares over the rows and over the columns of matrices, as Adafactor keeps them."""
