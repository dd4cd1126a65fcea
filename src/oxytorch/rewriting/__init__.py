"""What `optimize`, `llm.optimize` and `quantize_` share.

Changes with the way back, the report, copies of models, memory.
"""
