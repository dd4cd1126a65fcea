"""The ways of running a language model beside oxytorch."""
