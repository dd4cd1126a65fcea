"""Steps on GPUs: launches that are made once for the tensors of a group and run in each step."""
