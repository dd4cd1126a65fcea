"""Translates rules.py into C++, when the library is built, and into OpenCL C."""
