"""Turns arguments of public calls into stores."""
