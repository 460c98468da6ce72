"""Adapters, through which other frameworks save and load with Flowstone. The library itself imports no adapter."""
