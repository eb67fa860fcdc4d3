"""Lets every test import the helpers that lie beside this file, such as `fakes`."""
