"""Compiled inner loops: everything that touches single blocks. Leaf functions of arrays, without state."""
