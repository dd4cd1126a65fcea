"""What more than one package stands on: levels, packed tensors, dtypes, errors, files."""
